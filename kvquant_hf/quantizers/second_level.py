"""Scales and zero points in a byte each, with a few numbers per block and head that say what the bytes stand for.

A scale is `base · 2^-((255 - byte) / 32)`, the zero of which is byte 0; a zero point is what puts the middle of the
grid at `span · 0.35 · sinh((byte - 128) / 28)`, with `span = scale · levels` the width of the grid. Near zero its
steps are an 80th of the width, and always below a 28th of the distance from zero plus that. Byte 0 of a zero point
stands for the next number of a list, which holds the zero points of those groups that lie farthest from zero for their
width.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from kvquant_hf.quantizers.affine import rounded_half

_LARGEST = torch.finfo(torch.float32).max
_HALF_MAX, _HALF_NORMAL = 65504.0, 2.0**-14
_STEPS = (32, 8)  # scales to the octave: where the smallest lies within eight octaves of the largest, and elsewhere
_CURVE, _SLOPE = 0.35, 28
_MOST = 127
_REACH = _CURVE * math.sinh(_MOST / _SLOPE)
# Neighbouring scales tried in search of the smallest whose grid covers a group.
_TRIES = 8


@cache
def scale_table(device: torch.device) -> torch.Tensor:
    """Scales over the base, `[2 · 256]`, float32, increasing: the fine steps, then the coarse ones."""
    with torch.inference_mode(False):
        rows = [[0.0] + [2.0 ** (-(255 - byte) / steps) for byte in range(1, 256)] for steps in _STEPS]
        return torch.tensor(rows, device=device).flatten()


@cache
def _middle_table(device: torch.device) -> torch.Tensor:
    """Middles over the span, `[255]`, float32, increasing: those of the bytes 1 … 255."""
    with torch.inference_mode(False):
        return torch.tensor([_CURVE * math.sinh(k / _SLOPE) for k in range(-_MOST, _MOST + 1)], device=device)


def expand_scales(codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Scales that bytes stand for.

    Args:
        codes: `[..., rows, groups]`, uint8.
        numbers: `[..., 1 + listed]`, float16 or float32: the base, negative where steps are coarse, and the listed
            zero points in the order of their groups.

    Returns:
        `[..., rows, groups]`, float32.
    """
    base = numbers[..., 0].float()[..., None, None]
    scale: torch.Tensor = scale_table(codes.device)[codes.long() + 256 * (base < 0)] * base.abs()
    return scale


def expand_zero_points(
    codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Zero points that bytes stand for.

    Args:
        codes: `[..., rows, groups]`, uint8.
        scale: What `expand_scales` made of their scales.
        levels: Steps between the lowest and the highest value, `[..., rows | 1, 1]`, float32.
        numbers: As for `expand_scales`.

    Returns:
        `[..., rows, groups]`, float32, finite where `numbers` are.
    """
    zero_point = _in_curve(codes, scale, levels)
    is_listed = codes == 0
    order = (is_listed.flatten(-2).cumsum(-1) - 1).clamp_(0, numbers.shape[-1] - 2)
    listed = numbers[..., 1:].float().gather(-1, order).view_as(zero_point)
    return torch.where(is_listed, listed, zero_point)


def _in_curve(codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    middle = _middle_table(codes.device)[(codes.long() - 1).clamp_min_(0)]
    return ((middle - 0.5) * levels * scale).clamp_(-_LARGEST, _LARGEST)


@dataclass(frozen=True)
class StoredParameters:
    """Bytes and what they stand for, `[..., rows, groups]` each; no zero points for symmetric codes."""

    scale_codes: torch.Tensor
    zero_codes: torch.Tensor | None
    scale: torch.Tensor
    zero_point: torch.Tensor | None


class SecondLevel:
    """What the groups of a block share, fitted to their ranges; finds the bytes of ranges.

    Everything of a block follows from that block alone, also whether its numbers are rounded to float16.

    Args:
        low: Minima of the groups, `[..., rows, groups]`, float32.
        high: Maxima.
        levels: As for `expand_zero_points`.
        num_listed: Zero points that are listed as they are; `None` for symmetric codes, which have none.
    """

    def __init__(self, low: torch.Tensor, high: torch.Tensor, levels: torch.Tensor, num_listed: int | None) -> None:
        self._levels = levels
        self._positions = self._listed = None
        step, middle = _step_and_middle(low, high, levels)
        needed, extent = step, torch.zeros_like(step)
        if num_listed is not None:
            # Relative to the width those lie farthest from zero; what is not a number is the first to be listed.
            far = middle.abs() / step.clamp_min(torch.finfo(torch.float32).tiny)
            order = far.flatten(-2).argsort(dim=-1, descending=True, stable=True)[..., :num_listed]
            self._positions = order.sort(dim=-1).values
            listed = torch.zeros_like(far.flatten(-2), dtype=torch.bool).scatter_(-1, self._positions, True)
            self._listed = listed.view_as(far)
            needed = torch.where(self._listed, step, _wide_enough(step, middle))
            extent = torch.where(self._listed, torch.maximum(low.abs(), high.abs()), 0.0)
        base = _largest(needed)
        half = (
            (base <= 0.99 * _HALF_MAX) & ((base == 0) | (base >= _HALF_NORMAL)) & (extent.amax((-2, -1)) <= _HALF_MAX)
        )
        self._half = half[..., None, None]
        if self._listed is not None:  # a listed zero point that float16 rounds down widens its group
            zero_point = self._rounded(low, up=False)
            needed = torch.where(self._listed, high / levels - zero_point / levels, needed)
            base = _largest(needed)
        self._base = self._rounded(base[..., None, None], up=True)
        smallest = torch.where(needed > 0, needed, torch.inf).amin((-2, -1), keepdim=True)
        is_coarse = smallest < self._base * 2.0 ** (-254 / _STEPS[0])
        self._coarse = is_coarse & torch.isfinite(smallest)

    def _rounded(self, numbers: torch.Tensor, *, up: bool) -> torch.Tensor:
        """Numbers `[..., 1 | rows, 1 | groups]` as the list holds them, float32."""
        near = rounded_half(numbers.clamp(-_HALF_MAX, _HALF_MAX), up=up).float()
        return torch.where(self._half, near, numbers)

    def numbers(self, zero_point: torch.Tensor | None) -> torch.Tensor:
        """What is stored, `[..., 1 + listed]`, float32 if float16 does not hold it, given the zero points chosen."""
        numbers = torch.where(self._coarse, -self._base, self._base).flatten(-3)
        numbers = numbers.view(*self._base.shape[:-2], 1)
        if zero_point is not None and self._positions is not None:
            numbers = torch.cat([numbers, zero_point.flatten(-2).gather(-1, self._positions)], -1)
        return numbers.half() if bool(self._half.all()) else numbers

    def stored(self, low: torch.Tensor, high: torch.Tensor) -> StoredParameters:
        """Bytes of ranges within those that this was fitted to; their grids cover the ranges."""
        step, middle = _step_and_middle(low, high, self._levels)
        if self._listed is None:
            codes = self._scale_codes(step)
            return StoredParameters(codes, None, self._scales(codes), None)
        listed = self._rounded(low, up=False)
        first = torch.maximum(step, middle.abs() / _REACH)
        codes = self._scale_codes(torch.where(self._listed, high / self._levels - listed / self._levels, first))
        found = self._listed
        best = torch.where(found, codes, self._scale_codes(_wide_enough(step, middle)))
        for more in range(_TRIES):
            tried = (codes + more).clamp_(max=255)
            scale = self._scales(tried)
            off = (middle - _middle_table(low.device)[_nearest_middle(middle, scale)] * scale).abs()
            fits = ~found & (off <= (scale - step) / 2)
            best = torch.where(fits & (tried < best), tried, best)
            found = found | fits
        scale = self._scales(best)
        zero_codes = torch.where(self._listed, 0, _nearest_middle(middle, scale) + 1).to(torch.uint8)
        zero_point = torch.where(self._listed, listed, _in_curve(zero_codes, scale, self._levels))
        return StoredParameters(best, zero_codes, scale, zero_point)

    def _scale_codes(self, scale: torch.Tensor) -> torch.Tensor:
        """The smallest bytes whose scales are not below these, int64; the largest byte where there is none."""
        table = scale_table(scale.device).view(len(_STEPS), 256)
        over = (scale / torch.where(self._base > 0, self._base, 1.0)).contiguous()
        codes = torch.where(self._coarse, torch.searchsorted(table[1], over), torch.searchsorted(table[0], over))
        codes.clamp_(max=255)
        return torch.where(self._scales(codes) < scale, codes + 1, codes).clamp_(max=255)  # the quotient was rounded

    def _scales(self, codes: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = scale_table(codes.device)[codes + 256 * self._coarse] * self._base
        return scale


def _step_and_middle(low: torch.Tensor, high: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Width and middle of ranges, both over `levels`: neither they nor sums of two of them overflow."""
    return high / levels - low / levels, (low / 2 + high / 2) / levels


def _nearest_middle(middle: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Index in `_middle_table` of the nearest to `middle / scale`, int64."""
    table = _middle_table(middle.device)
    over = (middle / torch.where(scale > 0, scale, 1.0)).contiguous()
    above = torch.searchsorted(table, over).clamp_(1, len(table) - 1)
    return torch.where(over - table[above - 1] <= table[above] - over, above - 1, above)


def _wide_enough(step: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """A scale with which the nearest middle certainly leaves the range covered."""
    wide = torch.maximum(step, middle.abs() / _REACH)
    far = middle.abs() / torch.where(wide > 0, wide, 1.0)
    gap = 1.02 * (_CURVE**2 + far.square()).sqrt_() / _SLOPE
    return wide / (1 - gap.clamp_(max=0.7))


def _largest(scale: torch.Tensor) -> torch.Tensor:
    """The largest finite scale of each block, `[...]`."""
    return torch.where(torch.isfinite(scale), scale, 0.0).amax((-2, -1))
