"""Groups along the inner dimension of attention's products, symmetric or the better of two kinds (InnerQ)."""

from dataclasses import replace

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.sums import sum_by_halves
from kvquant_hf.spec import QuantSpec

# Normal numbers of float16 that factors keep to.
_SMALLEST, _LARGEST = 2.0**-14, 2.0**15
# Dequantized numbers of a block stay below this: an error of a step above the largest float32 would be infinite.
_REACH = 2.0**126


class InnerQuantizer:
    """Codes of groups that one scale serves along the sum of a product, after a normalization of key channels.

    InnerQ (arXiv 2602.23200) groups keys along the channels of a token, which `q · K` sums over, and values along the
    tokens of a channel, which `p · V` sums over: `granularity` `per_token` for keys, `per_channel` for values. One
    partial sum is then multiplied by a scale instead of every element.

    Per-token groups, whose channels differ in size, are divided by `n_c = sqrt(max_t |x[t, c]|)` first, the factor of
    channel `c` in a block (the paper takes it from the first tokens and keeps it). Per-channel groups have no factor,
    since their scales would take it up. Factors are float16 within 2^-14 … 2^15; a channel of zeros has 1, and so has
    every channel of a block whose numbers come near the largest float32.

    With `symmetric` the codes of `b` bits are a sign and a magnitude: `2^b - 1` levels evenly about zero, which is one
    of them, `scale = max|x| / (2^(b-1) - 1)`. Without, each group is stored that way or with a zero point, as
    `AffineQuantizer` does, whichever has the smaller sum of absolute errors (of
    a short last group the last entry counts for those that are missing; the paper's hybrid; its second kind has
    one bit less than ours, which costs no fewer bytes here). The sign of the scale says which: negative with a zero
    point.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self._has_factor = spec.has_factor
        self._groups = SignMagnitude(spec) if spec.symmetric else Hybrid(spec)

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of blocks `[..., rows, length]`, see `Quantizer.quantize`."""
        if not self._has_factor:
            return self._groups.quantize(rows, range_rows, feedback)
        factor = channel_factors(rows if range_rows is None else range_rows)
        divisor = factor.float()[..., None, :]
        groups = self._groups.quantize(rows / divisor, None if range_rows is None else range_rows / divisor, feedback)
        return replace(groups, factor=factor)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        return self._groups.dequantize(groups)


class SignMagnitude(AffineQuantizer):
    """Symmetric codes of an odd number of levels, so that zero is one of them: `x ≈ scale · (code - middle)`."""

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(replace(spec, symmetric=True))

    @property
    def levels(self) -> int:
        """Steps between the lowest and the highest value."""
        return int(2**self.nbits - 2)


class Hybrid(AffineQuantizer):
    """Per group, codes with a zero point where the scale's sign bit is set, else `SignMagnitude` ones."""

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(replace(spec, symmetric=False))
        self._even = SignMagnitude(spec)
        self._shifted = AffineQuantizer(replace(spec, symmetric=False))

    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points `[...]` of groups `[..., n]`, as they are stored."""
        even, _ = self._even.fit(groups)
        scale, zero_point = self._shifted.fit(groups)
        assert zero_point is not None
        dtype = torch.promote_types(even.dtype, scale.dtype)
        candidates = torch.stack((even.to(dtype), -scale.to(dtype)))
        zero_points = torch.stack((torch.zeros_like(zero_point), zero_point)).to(dtype)
        errors = []
        for i in range(2):
            codes = self._codes(groups, candidates[i], zero_points[i])
            off = self._values(codes, candidates[i], zero_points[i]) - groups
            errors.append(sum_by_halves(off.abs_(), -1)[..., 0])
        shifted = errors[1] < errors[0]
        return torch.where(shifted, candidates[1], candidates[0]), torch.where(shifted, zero_points[1], zero_points[0])

    def _codes(
        self,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        most: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        size, shifted = scale.abs(), scale.signbit()[..., None]
        even = self._even._codes(groups, size, None)
        return torch.where(shifted, self._shifted._codes(groups, size, zero_point, most), even)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        size, shifted = scale.abs(), scale.signbit()[..., None]
        even = self._even._values(codes, size, None)
        return torch.where(shifted, self._shifted._values(codes, size, zero_point), even)


def channel_factors(blocks: torch.Tensor) -> torch.Tensor:
    """Square roots of the largest sizes of the columns of blocks `[..., rows, length]`: `[..., length]`, float16."""
    peak = blocks.abs().amax(-2)
    factor = torch.where(peak > 0, peak, 1.0).sqrt().clamp(_SMALLEST, _LARGEST).half()
    wide = factor.float()
    # Any column's error may be a step of the group's largest quotient times the column's own factor.
    reach = (peak / wide).amax(-1, keepdim=True) * wide.amax(-1, keepdim=True).clamp_min(1.0)
    return torch.where(reach <= _REACH, factor, torch.ones_like(factor))
