"""Tiles of equal spread: `x ≈ (scale · code + zero_point) · factor`, the factor taken out before rounding."""

from dataclasses import replace

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.sums import sum_by_halves
from kvquant_hf.spec import QuantSpec

# Alternating normalizations of rows and columns; KVarN uses about eight.
_STEPS = 8
# Factors lie within this many times their median, where float16 holds all its digits.
_REACH = 2.0**12
# Below this share of a row's largest number its spread is rounding, and the row counts as constant.
_ROW_FLOOR = 1e-6
_COLUMN_FLOOR = 1e-20
# Dequantized numbers of a tile stay below this: an error of a step above the largest float32 would be infinite.
_LARGEST = 2.0**126
_FINITE, _HALF_MAX = torch.finfo(torch.float32).max, 65504.0


class VarianceNormalizedQuantizer:
    """Affine codes of tiles whose rows and columns have been brought to equal standard deviation.

    KVarN (arXiv 2606.03458): a tile of tokens and channels is divided by the standard deviations of its rows and of
    its columns in turn, until both are even. A factor shared by a whole row needs no place of its own, since scale and
    zero point of the row's groups take it up; the factor of the columns is stored. For keys per channel it belongs to
    a token, for values per token to a channel. A token of unusual size then widens nobody else's range. Codes are
    those of `AffineQuantizer` for the tile over its stored factors, with all its settings.

    A tile whose rows are constant has the factor 1 and comes back as exactly as from `AffineQuantizer`. A constant row
    among others is off by at most half a step of a range of `|x| · (1 / min f - 1 / max f)`, times `f`.

    With `spec.centered` the mean of each group is taken out first, and stored in place of the zero point: it is added
    after the factor, `x ≈ scale · (code - middle) · factor + mean`, codes being even about it. Factors then are those
    of what tells numbers apart, and a row far from zero (keys with a bias) does not become one that varies as they do.
    Errors are at most half a step times the factor; constant rows come back exactly if float16 holds the number.

    Factors are float16: they are limited to 2^-12 … 2^12 of their median, beyond which the range of the groups takes
    up the rest. Tiles with numbers near the largest float32 have the factor 1.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self._centered = spec.centered
        self._affine = AffineQuantizer(replace(spec, symmetric=True, centered=False) if spec.centered else spec)

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of tiles `[..., rows, length]`, see `Quantizer.quantize`."""
        fitted = rows if range_rows is None else range_rows
        center = self._centers(fitted) if self._centered else None
        if center is not None:
            own = self._spread_out(center, rows)
            rows, fitted = rows - own, fitted - own
        factor = column_factors(fitted)
        divisor = factor.float()[..., None, :]
        # Feedback acts within a column, whose factor it leaves alone.
        groups = self._affine.quantize(rows / divisor, None if range_rows is None else fitted / divisor, feedback)
        scale, zero_point = groups.scale, groups.zero_point
        if center is not None:
            dtype = torch.promote_types(scale.dtype, center.dtype)
            scale, zero_point = scale.to(dtype), center.to(dtype)
        return QuantizedGroups(groups.codes, scale, zero_point, factor)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        if not self._centered:
            return self._affine.dequantize(groups)
        assert groups.zero_point is not None
        values = self._affine.dequantize(replace(groups, zero_point=None))
        values += self._spread_out(groups.zero_point, values)
        # A mean near the largest float32 and half a step beyond it.
        return values.clamp_(-_FINITE, _FINITE) if groups.scale.dtype == torch.float32 else values

    def _centers(self, rows: torch.Tensor) -> torch.Tensor:
        """Means of the groups of rows, `[..., rows, groups]`, float16; float32 if one is beyond that.

        Groups with numbers near the largest float32, whose differences need not be finite, have the mean 0.
        """
        groups = self._affine.grouped(rows)
        means = sum_by_halves(groups / groups.shape[-1], -1).squeeze(-1)
        means = torch.where(groups.abs().amax(-1) <= _LARGEST, means, 0.0)
        wide = means.abs() > _HALF_MAX
        half = means.half()
        return torch.where(wide, means, half.float()) if bool(wide.any()) else half

    def _spread_out(self, center: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Means `[..., rows, groups]` for each number of rows `[..., rows, length]`, float32."""
        return center.float().repeat_interleave(self._affine.group_size, -1)[..., : rows.shape[-1]]


def column_factors(tiles: torch.Tensor) -> torch.Tensor:
    """Standard deviations of the columns once rows and columns have been evened out.

    Args:
        tiles: `[..., rows, length]`, float32.

    Returns:
        `[..., length]`, float16, positive; 1 is their median, up to rounding.
    """
    peak = tiles.abs().amax(-1, keepdim=True)
    even = tiles / torch.where(peak > 0, peak, 1.0)
    factor = torch.ones_like(even[..., :1, :])
    for _ in range(_STEPS):
        even /= _spread(even, -1, _ROW_FLOOR)
        step = _spread(even, -2, _COLUMN_FLOOR)
        even /= step
        factor *= step
    factor /= factor.median(-1, keepdim=True).values
    factor = factor.clamp_(1 / _REACH, _REACH).half()
    wide = factor.float()
    reach = (tiles / wide).abs().amax((-2, -1), keepdim=True) * wide.amax(-1, keepdim=True).clamp_min(1.0)
    return torch.where(reach <= _LARGEST, factor, torch.ones_like(factor)).squeeze(-2)


def _spread(tiles: torch.Tensor, dim: int, floor: float) -> torch.Tensor:
    """Standard deviation along `dim`, kept as a dimension; 1 where it is below `floor`."""
    size = tiles.shape[dim]
    apart = tiles - sum_by_halves(tiles, dim) / size
    deviation = (sum_by_halves(apart.square_(), dim) / size).sqrt_()
    return torch.where(deviation >= floor, deviation, 1.0)
