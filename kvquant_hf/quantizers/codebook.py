"""Codes with levels from a table: `x ≈ scale · table[code] + zero_point`, one scale and zero point per group."""

from itertools import product

import torch

from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.feedback import codes_with_feedback, row_of
from kvquant_hf.quantizers.grouped import GroupedQuantizer
from kvquant_hf.quantizers.levels import Levels, levels_of
from kvquant_hf.quantizers.sums import sum_by_halves
from kvquant_hf.spec import QuantSpec

_HALF_MAX = 65504.0
# Below this the spacing of float16 (2**-24) distorts a scale by more than 0.4 %.
_HALF_SMALL_SCALE = 2.0**-16
_LARGEST = torch.finfo(torch.float32).max
# Widths tried by `clip="mse"`, as shares of the full range. The outermost of a few levels lie well inside the range of
# a large group, those of many levels outside the range of a small one. At 1.5 times the range the largest number of
# `e2m1` becomes a 4, not a 6, which leaves no gap below it ("Four Over Six", arXiv 2512.02010).
_CLIP_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 1.1, 1.25, 1.5)


class CodebookQuantizer(GroupedQuantizer):
    """Codes of unevenly spaced levels, those of `QuantSpec.levels`.

    Asymmetric codes have the middle of the group's range as zero point, symmetric ones have none. The scale brings the
    range to that of the table (FP8: the largest magnitude over 448), to -1 and 1 for levels that are listed. With
    `clip="mse"` a share of the range, about its middle or about the mean, takes its place where that has less squared
    error. Within the full range a number is off by at most half the widest gap between levels, or by the way from the
    end of the range to the outermost level where that is longer, times the scale (a float16 scale adds one part in
    2048 of the range). A constant group comes back exactly if its number is a float16 and codes are asymmetric; if
    they are symmetric, to float16 precision where the table reaches as far as the range.

    Parameters are float16; those of a group that needs it are float32, whatever its neighbours are.
    """

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.name = spec.levels

    def fit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points `[..., num_groups]` of rows `[..., length]`, as they are stored."""
        return self._fit(levels_of(self.name, self.nbits, rows.device), self.grouped(rows), self._valid(rows))

    def codes_of_groups(
        self,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        feedback: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Codes of groups, see `GroupedQuantizer.codes_of_groups`."""
        levels = levels_of(self.name, self.nbits, groups.device)
        if feedback is None:
            return _codes(levels, groups, scale, zero_point)

        def round_row(row: int, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            own_scale, own_zero = scale[:, :, :, row], row_of(zero_point, row)
            codes = _codes(levels, targets, own_scale, own_zero)
            return codes, _values(levels, codes, own_scale, own_zero)

        return codes_with_feedback(groups, feedback, round_row, exact)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        levels = levels_of(self.name, self.nbits, groups.codes.device)
        length = groups.codes.shape[-1]
        codes = self.grouped(groups.codes)
        return _values(levels, codes, groups.scale, groups.zero_point).flatten(-2)[..., :length]

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., length]` to `[..., num_groups, group_size]`, a short last group filled with its last element."""
        missing = -rows.shape[-1] % self.group_size
        if missing:
            rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], -1)
        return rows.reshape(*rows.shape[:-1], -1, self.group_size)

    def _valid(self, rows: torch.Tensor) -> torch.Tensor | None:
        """1 where groups hold elements of the rows, 0 where they are filled up; `None` where nothing is."""
        length = rows.shape[-1]
        if length % self.group_size == 0:
            return None
        places = torch.arange(-(-length // self.group_size) * self.group_size, device=rows.device)
        return (places < length).float().reshape(-1, self.group_size)

    def _fit(
        self, levels: Levels, groups: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points `[...]` of groups `[..., n]`, as they are stored."""
        low, high = groups.amin(-1), groups.amax(-1)
        extent = torch.maximum(high, -low)
        if self.symmetric:
            high, low = extent, -extent
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        scale = half / levels.reach
        wide = (extent > _HALF_MAX) | ((scale > 0) & (scale < _HALF_SMALL_SCALE) & (scale * 2**10 > extent))
        zero_point = None
        if not self.symmetric:
            zero_point = _stored(middle, wide)
            # The middle of what was stored is a little off; the scale makes up for it.
            half = torch.maximum(high - zero_point, zero_point - low).clamp_(max=_LARGEST)
        scale = _stored(half / levels.reach, wide)
        if self.clip == "mse":
            scale, zero_point = _clipped(levels, groups, valid, half, scale, zero_point, wide)
        dtype = torch.float32 if bool(wide.any()) else torch.float16
        return scale.to(dtype), None if zero_point is None else zero_point.to(dtype)


def _stored(numbers: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Numbers as they are stored, float32: rounded to float16 except where `wide`."""
    return torch.where(wide, numbers, numbers.half().float())


def _clipped(
    levels: Levels,
    groups: torch.Tensor,
    valid: torch.Tensor | None,
    half: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    wide: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Per group, the parameters among those tried whose codes have the least squared error.

    Tried are `_CLIP_SHARES` of the full range, about its middle (or zero, for symmetric codes) and about the mean:
    most levels lie where most numbers are.
    """
    centers = [zero_point]
    if zero_point is not None:
        shares = groups / groups.shape[-1] if valid is None else groups * (valid / valid.sum(-1, keepdim=True))
        centers.append(_stored(sum_by_halves(shares, -1).squeeze(-1), wide))
    best = torch.full_like(half, torch.inf)
    # Squares of huge and of tiny numbers are no numbers any more.
    unit = torch.where(half >= torch.finfo(torch.float32).tiny, half, 1.0)[..., None]
    for center, share in product(centers, _CLIP_SHARES):
        tried = _stored(share * half / levels.reach, wide)
        codes = _codes(levels, groups, tried, center)
        errors = _values(levels, codes, tried, center).sub_(groups).div_(unit).square_()
        error = sum_by_halves(errors if valid is None else errors.mul_(valid), -1).squeeze(-1)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
        if zero_point is not None and center is not None:
            zero_point = torch.where(better, center, zero_point)
    return scale, zero_point


def _codes(levels: Levels, groups: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """Codes of groups `[..., n]` against stored parameters `[...]`, uint8."""
    step = scale.float()[..., None]
    # A step too small for its reciprocal to be finite belongs to a group that is constant for all purposes.
    inverse = torch.where(step >= torch.finfo(torch.float32).tiny, 1 / step, 0)
    if zero_point is not None:
        # Infinite only for numbers outside the range that parameters were fitted to.
        groups = (groups - zero_point.float()[..., None]).clamp_(-_LARGEST, _LARGEST)
    return levels.nearest(groups * inverse)


def _values(levels: Levels, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """Values of codes `[..., n]` with parameters `[...]`, float32."""
    values = levels.values(codes).mul_(scale.float()[..., None])
    if zero_point is not None:
        # Not fused with the product, which would round differently from place to place.
        values.add_(zero_point.float()[..., None])
    # The outermost value of a range as wide as float32 is may lie a rounding beyond it.
    return values.clamp_(-_LARGEST, _LARGEST) if scale.dtype == torch.float32 else values


class TurboQuantizer(CodebookQuantizer):
    """Gaussian levels for tokens in the Hadamard basis, with the norm of each group restored exactly.

    TurboQuant's `mse` variant (arXiv 2504.19874, section 3.1): a token of norm `n` becomes `n` times a direction;
    after a rotation the coordinates of a direction in `D` dimensions are near-Gaussian with the variance `1 / D`, and
    each takes the nearest of the levels of least squared error for that. What is stored is not `n` but `n` over the
    norm of the chosen levels, so that a token comes back with its own norm (nearest levels lie inwards on average:
    without the correction norms shrink). The rotation is the plain Hadamard matrix, without random signs. The paper's
    residual stage (QJL) is left out: its inner products are unbiased, but softmax amplifies the variance they cost.

    Codes are chosen for `n / sqrt(D)` and therefore not computed against the stored scale, which follows from them.
    There is one group per token and head up to a head size of 128; larger heads have a norm per 128 channels. Tokens
    of numbers near the largest float32 may come back smaller, as their scale would be beyond it.
    """

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`; without `feedback`, which serves keys per channel."""
        if feedback is not None:
            raise ValueError("`feedback` serves keys per channel; `method='turboquant'` stores tokens.")
        levels = levels_of(self.name, self.nbits, rows.device)
        fitted = self.grouped(rows if range_rows is None else range_rows)
        valid = self._valid(rows)
        peak = fitted.abs().amax(-1, keepdim=True)
        spread = _norm(fitted / torch.where(peak > 0, peak, 1.0), valid)
        sigma = spread / (fitted.shape[-1] if valid is None else valid.sum(-1, keepdim=True)) ** 0.5

        def nearest(groups: torch.Tensor) -> torch.Tensor:
            even = (groups / torch.where(peak > 0, peak, 1.0)).clamp_(-_LARGEST, _LARGEST)
            return levels.nearest(even / torch.where(sigma > 0, sigma, 1.0))

        codes = nearest(fitted)
        scale = (spread / _norm(levels.values(codes), valid) * peak).squeeze(-1).clamp_(max=_LARGEST)
        wide = (scale > _HALF_MAX) | ((scale > 0) & (scale < _HALF_SMALL_SCALE))
        scale = _stored(scale, wide).to(torch.float32 if bool(wide.any()) else torch.float16)
        if range_rows is not None:
            codes = nearest(self.grouped(rows))
        return QuantizedGroups(codes.flatten(-2)[..., : rows.shape[-1]], scale, None)


def _norm(groups: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Euclidean norms `[..., 1]` of groups `[..., n]` of moderate numbers."""
    squares = groups.square()
    return sum_by_halves(squares if valid is None else squares.mul_(valid), -1).sqrt_()
