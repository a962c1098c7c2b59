"""Checks of what users set; errors name the argument, the allowed values and the value received."""

import difflib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import cast


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless `value` is one of `allowed` (of the same type: `True` is not 1).

    Raises:
        ValueError: Names the argument, the allowed values, the value received and the nearest allowed word.
    """
    choices = tuple(allowed)
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return
    raise ValueError(f"`{name}` must be one of {choices}, got {value!r}.{nearest(value, choices)}")


def nearest(value: object, choices: Iterable[object]) -> str:
    """` Did you mean …?` for a likely typo, else an empty string."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_keys(name: str, mapping: object, allowed: Iterable[str]) -> None:
    """Raise unless `mapping` is a mapping whose keys are all in `allowed`."""
    known = tuple(allowed)
    if not isinstance(mapping, Mapping):
        raise ValueError(f"`{name}` must be a mapping with keys among {known}, got {mapping!r}.")
    for key in mapping:
        if key not in known:
            raise ValueError(f"`{name}` has no setting {key!r}; allowed are {known}.{nearest(key, known)}")


def check_ascending(name: str, values: Sequence[object], most: float) -> tuple[float, ...]:
    """Numbers from `-most` to `most`, each larger than the one before even when rounded to float32.

    Returns:
        The same as floats.

    Raises:
        ValueError: They are something else.
    """
    found = [float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else math.nan for v in values]
    in_range = all(abs(value) <= most for value in found)  # false for NaN
    if not in_range or any(_single(low) >= _single(high) for low, high in pairwise(found)):
        raise ValueError(
            f"`{name}` must be ascending numbers from {-most:g} to {most:g} that differ in float32, got {values!r}."
        )
    return tuple(found)


def check_permutation(name: str, values: object) -> tuple[int, ...]:
    """The numbers from 0 to `len(values) - 1` in any order, or nothing.

    Returns:
        The same as a tuple.

    Raises:
        ValueError: They are something else.
    """
    found = tuple(values) if isinstance(values, (list, tuple)) else None
    if found is None or any(type(value) is not int for value in found) or sorted(found) != list(range(len(found))):
        raise ValueError(f"`{name}` must be the numbers from 0 to n - 1 in any order, or empty, got {values!r}.")
    return found


def _single(value: float) -> float:
    """A number rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def check_threshold(name: str, value: object, least: float) -> None:
    """Raise unless `value` is `None` or a finite number ≥ `least`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and least <= cast(float, value) < math.inf):
        raise ValueError(f"`{name}` must be a finite number >= {least:g} or None, got {value!r}.")


def check_length(name: str, value: object) -> None:
    """Raise unless `value` is an integer ≥ 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"`{name}` must be an integer >= 0, got {value!r}.")
