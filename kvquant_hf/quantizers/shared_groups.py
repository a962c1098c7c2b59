"""Affine codes whose consecutive groups share a scale or a zero point."""

from collections.abc import Callable

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.spec import QuantSpec

_LARGEST = torch.finfo(torch.float32).max


class SharedGroupsQuantizer(AffineQuantizer):
    """The codes of `AffineQuantizer`, with one scale or one zero point for `spec.shared_groups` consecutive groups.

    A shared scale is the largest that one of the groups needs, a shared zero point the least of theirs; the other
    parameter is each group's own. Either way the stored grid of every group covers its range, and with `clip="minmax"`
    no number is off by more than half a step of the stored scale. That step is the range of the widest group over
    `2 ** nbits - 1` where the scale is shared, and the distance from the least minimum of the groups to the own
    maximum over that where the zero point is. The topmost value of a group may lie half a step above its range where
    the scale is shared.

    A constant group comes back as `AffineQuantizer` gives it back where the scale is shared, or where the groups that
    share a zero point are all equal. Beside other groups it is off by what `2 ** nbits - 1` times its scale is rounded
    up, one part in 1,024 of its distance from the shared zero point in the range of normal float16 scales.

    Clipped ranges are all those of `AffineQuantizer`, the same share of it for the groups that share, by the sum of
    their squared errors. Numbers that are not finite spread to those groups, not beyond.

    Args:
        spec: Settings.
    """

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self._count = spec.shared_groups
        self._shares_scale = spec.shared_parameter == "scale"

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`; what is shared is there once, `[..., rows, sets of groups]`."""
        scale, zero_point = self.fit_rows(rows if range_rows is None else range_rows)
        assert zero_point is not None
        codes = self.codes_of_rows(rows, scale, zero_point, feedback)
        if self._shares_scale:
            return QuantizedGroups(codes, scale[..., :: self._count], zero_point)
        return QuantizedGroups(codes, scale, zero_point[..., :: self._count])

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        return self._unscaled(groups.codes, *self.expanded(groups))

    def expanded(self, groups: QuantizedGroups) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points of all groups, `[..., rows, num_groups]` each."""
        scale, zero_point = groups.scale, groups.zero_point
        assert zero_point is not None
        if self._shares_scale:
            return scale.repeat_interleave(self._count, -1)[..., : zero_point.shape[-1]], zero_point
        return scale, zero_point.repeat_interleave(self._count, -1)[..., : scale.shape[-1]]

    def _parameters(
        self, low: torch.Tensor, high: torch.Tensor, wide: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale, zero_point = super()._parameters(self._lowest(low), high, wide)
        return self._together(scale, torch.amax) if self._shares_scale else scale, zero_point

    def _needs_float32(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        # What is shared must be the same number for all, rounded or not.
        return self._together(super()._needs_float32(self._lowest(low), high), torch.amax)

    def _squared_error(
        self, groups: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
    ) -> torch.Tensor:
        return self._together(super()._squared_error(groups, scale, zero_point), torch.sum)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        values = super()._values(codes, scale, zero_point)
        # Half a step above a range that ends at the largest number there is.
        reaches = self._shares_scale and scale.dtype == torch.float32
        return values.clamp_(-_LARGEST, _LARGEST) if reaches else values

    def _lowest(self, low: torch.Tensor) -> torch.Tensor:
        """Minima of groups `[..., num_groups]`, those of the groups that share a zero point made equal."""
        return low if self._shares_scale else self._together(low, torch.amin)

    def _together(self, numbers: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Numbers of groups `[..., num_groups]`, each replaced by what the groups that share have in common."""
        sets = numbers.split(self._count, -1)
        return torch.cat([reduce(part, dim=-1, keepdim=True).expand_as(part) for part in sets], -1)
