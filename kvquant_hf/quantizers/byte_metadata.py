"""Affine codes whose scales and zero points take a byte each."""

import torch

from kvquant_hf.quantizers.affine import _CLIP_SHARES, AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.promoted import PromotedQuantizer
from kvquant_hf.quantizers.second_level import SecondLevel, StoredParameters, expand_scales, expand_zero_points
from kvquant_hf.quantizers.sums import sum_by_halves
from kvquant_hf.spec import EXTRA_BITS, QuantSpec

_LARGEST = torch.finfo(torch.float32).max


class ByteMetadataQuantizer(AffineQuantizer):
    """The codes of `AffineQuantizer` and `PromotedQuantizer`, with metadata at half the bits (see `second_level`).

    Quantizing the quantization constants once more is QLoRA's double quantization (arXiv 2305.14314, section 3). Bytes
    round up: the grid of every group covers its range, and is wider by 2.2 % at most for the scale and by 1.3 % for a
    zero point in the middle of the range, more for one far from it. Where the scales of a block span more than 7.9
    octaves they are up to 9.1 % wide instead of 2.2 %, and where they span more than 31.75, the narrowest groups get
    the smallest scale there is.

    A constant group is off by at most half a step: not at all where it is zero; by the rounding of its listed zero
    point (none for numbers of a half type), as one of the farthest from zero; and by at most `|x| / (2 · levels · 14)`
    otherwise. Clipped ranges are chosen among those that bytes can say.

    Args:
        spec: Settings.
        partners: See `PromotedQuantizer`.
    """

    def __init__(self, spec: QuantSpec, partners: torch.Tensor | None = None) -> None:
        super().__init__(spec)
        self._spec = spec
        self._promotion = PromotedQuantizer(spec, partners) if spec.promotes else None

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`; scales and zero points are bytes."""
        groups = self.grouped(rows)
        fitted = groups if range_rows is None else self.grouped(range_rows)
        promoted = None if self._promotion is None else self._promotion.widest(fitted)
        levels = self._levels_of_rows(fitted, promoted)
        second, best = self._fitted(fitted, levels)
        codes = self.codes_up_to(levels, groups, best.scale, best.zero_point, feedback)
        zero_codes = None if best.zero_codes is None else best.zero_codes.to(torch.uint8)
        return QuantizedGroups(
            codes.flatten(-2)[..., : rows.shape[-1]],
            best.scale_codes.to(torch.uint8),
            zero_codes,
            promoted=promoted,
            second_level=second.numbers(best.zero_point),
        )

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        return self._unscaled(groups.codes, *self.expanded(groups))

    def expanded(self, groups: QuantizedGroups) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points of the groups, `[..., rows, num_groups]`, float32."""
        assert groups.second_level is not None
        scale = expand_scales(groups.scale, groups.second_level)
        if groups.zero_point is None:
            return scale, None
        levels = self._levels_of_rows(groups.scale[..., None], groups.promoted)[..., None]
        return scale, expand_zero_points(groups.zero_point, scale, levels, groups.second_level)

    def _levels_of_rows(self, groups: torch.Tensor, promoted: torch.Tensor | None) -> torch.Tensor:
        """Largest code of each row of groups `[..., rows, groups, n]`: `[..., rows]`, float32."""
        levels = torch.full(groups.shape[:-2], float(self.levels), device=groups.device)
        if promoted is not None:
            levels.scatter_(-1, promoted.long(), 2.0 ** (self.nbits + EXTRA_BITS) - 1)
        return levels

    def _fitted(self, groups: torch.Tensor, levels: torch.Tensor) -> tuple[SecondLevel, StoredParameters]:
        low, high = groups.amin(-1), groups.amax(-1)
        num_listed = None
        if self.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        else:
            num_listed = self._spec.num_listed(low.shape[-2] * low.shape[-1])
        second = SecondLevel(low, high, levels[..., None], num_listed)
        best = second.stored(low, high)
        if self.clip != "mse":
            return second, best
        error = self._error(groups, best, levels)
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        for share in _CLIP_SHARES:
            other = second.stored(middle - share * half, middle + share * half)
            other_error = self._error(groups, other, levels)
            best = _chosen(other_error < error, other, best)
            error = torch.minimum(error, other_error)
        return second, best

    def _error(self, groups: torch.Tensor, stored: StoredParameters, levels: torch.Tensor) -> torch.Tensor:
        """Squared error of groups, `[..., rows, groups]`; sums in an order that depends on nothing else."""
        codes = self._codes(groups, stored.scale, stored.zero_point, levels[..., None, None])
        errors = self._values(codes, stored.scale, stored.zero_point).sub_(groups)
        return sum_by_halves(errors.square_(), -1).squeeze(-1)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        # The grid reaches farther than the range it covers, which may end at the largest number there is.
        return super()._values(codes, scale, zero_point).clamp_(-_LARGEST, _LARGEST)


def _chosen(choice: torch.Tensor, first: StoredParameters, second: StoredParameters) -> StoredParameters:
    """The parameters of `first` where `choice` holds, elsewhere those of `second`."""
    scale_codes = torch.where(choice, first.scale_codes, second.scale_codes)
    scale = torch.where(choice, first.scale, second.scale)
    if first.zero_codes is None or second.zero_codes is None:
        return StoredParameters(scale_codes, None, scale, None)
    assert first.zero_point is not None and second.zero_point is not None
    zero_codes = torch.where(choice, first.zero_codes, second.zero_codes)
    return StoredParameters(scale_codes, zero_codes, scale, torch.where(choice, first.zero_point, second.zero_point))
