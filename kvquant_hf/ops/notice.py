"""Warnings that are given once: a slower path is never taken in silence, nor complained about at every token."""

import warnings

_told: set[str] = set()


def tell_once(message: str, stacklevel: int = 4) -> None:
    """Warn, unless this message has been given before."""
    if message not in _told:
        _told.add(message)
        warnings.warn(message, stacklevel=stacklevel)


def no_compiler(error: Exception) -> None:
    """Say once that compiled code is missing, and why."""
    tell_once(f"The CPU kernel could not be compiled, the slower torch backend is used: {error}", stacklevel=5)
