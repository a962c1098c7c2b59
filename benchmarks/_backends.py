"""Making sure that a time belongs to the backend it is reported for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from kvquant_hf.ops import available_backends
from kvquant_hf.view import KVView

FAST = {"cpu": "cpu", "cuda": "triton"}


class FallbackError(RuntimeError):
    """A fused backend was asked for and the torch reference answered."""


def fast_backend(device: torch.device | str) -> str:
    """Name of the fused backend of a device; a cache set to it raises where `auto` would fall back.

    Raises:
        ValueError: This installation has none for it.
    """
    kind = torch.device(device).type
    name = FAST.get(kind)
    if name not in available_backends():
        raise ValueError(
            f"`device` must be one with a fused backend in this installation ({', '.join(available_backends())}), "
            f"got {str(device)!r}; name a backend to measure another one."
        )
    return name


@contextmanager
def no_fallback(backend: str) -> Iterator[None]:
    """While this lasts, whatever reads a view tile by tile (the torch reference, a dense copy) raises.

    Args:
        backend: Backend that should answer; `torch` and `dense` read tiles rightly.

    Raises:
        FallbackError: From within, at the first tile.
    """
    if backend in ("torch", "dense"):
        yield
        return

    def tiles(self: KVView, **_: Any) -> Any:
        raise FallbackError(f"backend {backend!r} was asked for, but something else read the cache")

    with patch.object(KVView, "tiles", tiles):
        yield
