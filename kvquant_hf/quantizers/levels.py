"""Tables of levels: what a code stands for before scale and zero point, `x ≈ scale · table[code] + zero_point`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

# Iterations stop when no level moves by more than this; levels are then rounded to six decimals, so that they are the
# same numbers on every machine.
_STILL = 1e-10
_DECIMALS = 6
# Powers of two by which the levels of a format are stored smaller, so that a float16 scale (then as much larger than
# the format's own) neither overflows nor loses digits.
_FORMAT_SHIFT = {"e4m3": -8, "e5m2": -15, "e2m1": 0}


@dataclass(frozen=True, eq=False)
class Levels:
    """A table and the way into it.

    Attributes:
        table: `[2 ** nbits]`, float32: level of each code.
        order: `[number of levels]`, uint8: codes in ascending order of their level, each level once.
        bounds: `[number of levels - 1]`, float32, ascending: a number up to and with `bounds[i]`, and above the one
            before it, belongs to `order[i]`.
        reach: What the largest number of a group is scaled to.
    """

    table: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor
    reach: float

    @classmethod
    def of(cls, table: torch.Tensor, reach: float | None = None) -> "Levels":
        """A table with numbers rounded to their nearest level, ties to the code whose lowest bit is 0.

        Args:
            table: `[2 ** nbits]`, float32; codes whose entry is not finite are never given out.
            reach: See above; the largest level by default.
        """
        finite = torch.isfinite(table).nonzero().flatten()
        by_level = finite[table[finite].argsort(stable=True)]
        ordered = table[by_level]
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] > ordered[:-1]  # of +0 and -0 the former, whose code is smaller
        order, ordered = by_level[first], ordered[first]
        bounds = (ordered[1:] + ordered[:-1]) / 2
        below = torch.nextafter(bounds, torch.full_like(bounds, -math.inf))
        bounds = torch.where(order[:-1] % 2 == 0, bounds, below)
        return cls(table, order.to(torch.uint8), bounds, float(ordered[-1]) if reach is None else reach)

    def to(self, device: torch.device) -> "Levels":
        """The same on a device."""
        if self.table.device == device:
            return self
        return Levels(self.table.to(device), self.order.to(device), self.bounds.to(device), self.reach)

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Codes of the nearest levels, uint8, of numbers `[...]`, float32."""
        return self.order[torch.bucketize(numbers.contiguous(), self.bounds, out_int32=True)]

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """Levels of codes, float32, contiguous; `codes` `[...]`, uint8."""
        return self.table.index_select(0, codes.flatten().int()).view(codes.shape)


def levels_of(name: str | tuple[float, ...], nbits: int, device: torch.device) -> Levels:
    """The table of a setting of `QuantSpec.levels`, on a device."""
    with torch.inference_mode(False):  # shared by later calls in any mode
        return _on_device(name, nbits, device)


@cache
def _on_device(name: str | tuple[float, ...], nbits: int, device: torch.device) -> Levels:
    return _on_cpu(name, nbits).to(device)


@cache
def _on_cpu(name: str | tuple[float, ...], nbits: int) -> Levels:
    if isinstance(name, tuple):
        return Levels.of(torch.tensor(name), reach=1.0)
    if name in _DENSITIES:
        half = _lloyd_max(_DENSITIES[name], 2 ** (nbits - 1))
        return Levels.of(torch.tensor([-level for level in reversed(half)] + half))
    return Levels.of(_format_table(name) * 2.0 ** _FORMAT_SHIFT[name])


def _format_table(name: str) -> torch.Tensor:
    """What each bit pattern of a floating-point format stands for, float32.

    `e4m3` and `e5m2` are those of "FP8 Formats for Deep Learning" (arXiv 2209.05433, table 1), largest numbers 448 and
    57344; `e2m1` is FP4 of the OCP Microscaling Formats specification (section 5.3.3), largest number 6.
    """
    if name == "e2m1":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return torch.cat([magnitudes, -magnitudes])
    patterns = torch.arange(256, dtype=torch.uint8)
    return patterns.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]).float()


# ---- levels of least squared error for a density ------------------------------------------------------------------

# Mean of a density of unit variance between two numbers from 0 to infinity.
_Mean = Callable[[float, float], float]


def _gaussian_mean(low: float, high: float) -> float:
    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    mass = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
    return (density(low) - density(high)) / mass


def _laplace_mean(low: float, high: float) -> float:
    rate = math.sqrt(2)
    if math.isinf(high):
        return low + 1 / rate
    width = high - low
    return low + 1 / rate - width / math.expm1(rate * width)


_DENSITIES: dict[str, _Mean] = {"gaussian": _gaussian_mean, "laplace": _laplace_mean}


def _lloyd_max(mean: _Mean, count: int) -> list[float]:
    """The positive half of the levels of least mean squared error for an even density of unit variance.

    Lloyd's method I and Max's conditions ("Least squares quantization in PCM", 1982; "Quantizing for minimum
    distortion", 1960): a boundary lies midway between two levels, a level is the mean of the density between its
    boundaries; the two are enforced in turn until nothing moves. Both densities here are log-concave, so that there is
    one fixed point. Its values for a Gaussian are Max's table I; TurboQuant (arXiv 2504.19874, section 3.1) uses them.

    Args:
        mean: See `_Mean`.
        count: Levels above zero.
    """
    levels = [3.0 * (place + 0.5) / count for place in range(count)]
    while True:
        bounds = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        moved = [mean(low, high) for low, high in pairwise(bounds)]
        if max(abs(new - old) for new, old in zip(moved, levels, strict=True)) < _STILL:
            return [round(level, _DECIMALS) for level in moved]
        levels = moved
