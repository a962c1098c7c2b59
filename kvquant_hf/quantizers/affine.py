"""Uniform quantization: `x ≈ scale · code + zero_point`, one scale and zero point per group."""

import torch

from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.feedback import codes_with_feedback, row_of
from kvquant_hf.quantizers.grouped import GroupedQuantizer

_HALF_MAX = 65504.0
# Below this the spacing of float16 (2**-24) distorts a scale by more than 0.4 %.
_HALF_SMALL_SCALE = 2.0**-16
# Widths tried by `clip="mse"`, as shares of the full range.
_CLIP_SHARES = tuple(1 - 0.05 * step for step in range(1, 11))


class AffineQuantizer(GroupedQuantizer):
    """Asymmetric (minimum as zero point) or symmetric uniform codes, optionally with a clipped range.

    Asymmetric codes are `round((x - zero_point) / scale)` with `zero_point` the group's minimum and `scale` the range
    over `2 ** nbits - 1` (KIVI, arXiv 2402.02750, section 3.1). Symmetric codes lie evenly about zero at odd multiples
    of `scale / 2`, with `scale = 2 · max|x| / (2 ** nbits - 1)`: all codes are in use, which pays at 2 bits, but zero
    itself is none of the values. The stored zero point is rounded down and the stored scale up, so that the stored
    grid always covers the range and a constant group comes back exactly (to float16 precision if symmetric).
    """

    def fit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points `[..., num_groups]` of rows `[..., length]`, as they are stored."""
        return self.fit(self.grouped(rows))

    def codes_of_groups(
        self,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        feedback: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Codes of groups, see `GroupedQuantizer.codes_of_groups`."""
        return self.codes_up_to(self.levels, groups, scale, zero_point, feedback, exact)

    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points `[...]` of groups `[..., n]`, as they are stored."""
        low, high = groups.amin(-1), groups.amax(-1)
        if self.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        wide = self._needs_float32(low, high)
        some = wide if bool(wide.any()) else None
        scale, zero_point = self._parameters(low, high, some)
        if self.clip == "mse":
            scale, zero_point = self._clipped(groups, low, high, scale, zero_point, some)
        return scale, zero_point

    def codes_up_to(
        self,
        most: int | torch.Tensor,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        feedback: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Codes of groups, uint8.

        Args:
            most: Largest code, of all rows or of each row `[B, H, n, rows]`.
            groups: `[B, H, n, rows, groups, n]`, float32.
            scale: Stored scales, without the last dimension.
            zero_point: Likewise.
            feedback: See `Quantizer.quantize`.
            exact: Like `groups`, bool: entries whose codes nobody reads, so that they have no error to feed back.
        """
        if feedback is None:
            limit = most if isinstance(most, int) else most[..., None, None]
            return self._codes(groups, scale, zero_point, limit).to(torch.uint8)

        def round_row(row: int, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            own_scale, own_zero = scale[:, :, :, row], row_of(zero_point, row)
            limit = most if isinstance(most, int) else most[:, :, :, row, None, None]
            codes = self._codes(targets, own_scale, own_zero, limit)
            return codes, self._values(codes, own_scale, own_zero)

        return codes_with_feedback(groups, feedback, round_row, exact)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        values = self._unscaled(groups.codes, groups.scale, groups.zero_point)
        return values if groups.factor is None else values.mul_(groups.factor.float()[..., None, :])

    def _unscaled(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """`scale · code + zero_point`, `[..., length]`, float32."""
        length = codes.shape[-1]
        if length % self.group_size == 0:
            groups = codes.reshape(*codes.shape[:-1], -1, self.group_size).float()
            return self._values(groups, scale, zero_point).flatten(-2)
        scale = scale.repeat_interleave(self.group_size, -1)[..., :length]
        if zero_point is not None:
            zero_point = zero_point.repeat_interleave(self.group_size, -1)[..., :length]
        return self._values(codes.float()[..., None], scale, zero_point).squeeze(-1)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Values of float codes `[..., groups, n]` with parameters `[..., groups]`."""
        step = scale.float()[..., None]
        if zero_point is None:
            return (codes - self._middle) * step
        offset, shrink = zero_point.float()[..., None], _headroom(scale)
        if shrink == 1:
            return torch.addcmul(offset, codes, step)
        return torch.addcmul(offset * shrink, codes, step * shrink).div_(shrink)

    @property
    def _middle(self) -> float:
        """Where zero lies among symmetric codes: between the two in the middle."""
        return self.levels / 2

    @property
    def levels(self) -> int:
        """Steps between the lowest and the highest value."""
        return int(2**self.nbits - 1)

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., length]` to `[..., num_groups, group_size]`, a short last group repeated until it fills one.

        Repeated as a whole, so that all its elements weigh alike in the choice of a clipped range (but for the first
        ones where a last round is cut short).
        """
        missing = -rows.shape[-1] % self.group_size
        if missing:
            rest = self.group_size - missing
            again = rows[..., -rest:].repeat(*(1,) * (rows.ndim - 1), -(-missing // rest))
            rows = torch.cat([rows, again[..., :missing]], -1)
        return rows.reshape(*rows.shape[:-1], -1, self.group_size)

    def _needs_float32(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Groups whose range float16 does not hold, bool.

        bfloat16 would reach as far as float32, but its 8 significant bits would round a large zero point by more than
        the spread of the group it belongs to; widening stored float16 parameters to float32 later changes no value.
        """
        extent = torch.maximum(high, -low)
        spread = high / self.levels - low / self.levels
        too_small = (spread > 0) & (spread < _HALF_SMALL_SCALE) & (spread * 2**10 > extent)
        return (extent > _HALF_MAX) | too_small

    def _parameters(
        self, low: torch.Tensor, high: torch.Tensor, wide: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stored scale and zero point (none for symmetric codes) whose grid covers `low … high`.

        They are float16, or float32 where `wide` says that some groups need it; the others' numbers are those of
        float16 all the same, whatever their neighbours are.
        """
        if self.symmetric:
            return _rounded(high / self._middle, wide, up=True), None
        zero_point = _rounded(low, wide, up=False)
        # Divided first: the difference of two large numbers of opposite sign may not be finite.
        scale = _rounded(high / self.levels - zero_point.float() / self.levels, wide, up=True)
        return scale, zero_point

    def _codes(
        self,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        most: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        shrink = _headroom(scale)
        step = scale.float()[..., None] * shrink
        # A step too small for its reciprocal to be finite belongs to a group that is constant for all purposes.
        inverse = torch.where(step >= torch.finfo(torch.float32).tiny, 1 / step, 0)
        if shrink != 1:
            groups = groups * shrink
        if zero_point is None:
            codes = (groups * inverse).add_(self._middle).round_()
        else:
            codes = ((groups - zero_point.float()[..., None] * shrink) * inverse).round_()
        if isinstance(most, torch.Tensor):
            return codes.clamp_(min=0).minimum(most)
        return codes.clamp_(0, self.levels if most is None else most)

    def _clipped(
        self,
        groups: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        wide: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Per group, the range among `_CLIP_SHARES` of the full one whose codes have the least squared error."""
        best = self._squared_error(groups, scale, zero_point)
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        for share in _CLIP_SHARES:
            new_scale, new_zero_point = self._parameters(middle - share * half, middle + share * half, wide)
            error = self._squared_error(groups, new_scale, new_zero_point)
            better = error < best
            best = torch.where(better, error, best)
            scale = torch.where(better, new_scale, scale)
            if zero_point is not None and new_zero_point is not None:
                zero_point = torch.where(better, new_zero_point, zero_point)
        return scale, zero_point

    def _squared_error(
        self, groups: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
    ) -> torch.Tensor:
        codes = self._codes(groups, scale, zero_point)
        return self._values(codes, scale, zero_point).sub_(groups).square_().sum(-1)


def _headroom(scale: torch.Tensor) -> float:
    """Power of two by which differences are computed smaller: float32 parameters may span more than float32 holds."""
    return 0.25 if scale.dtype == torch.float32 else 1.0


def _rounded(values: torch.Tensor, wide: torch.Tensor | None, *, up: bool) -> torch.Tensor:
    """Values in float16, rounded up or down; in float32, and not rounded where `wide`, if that is given."""
    if wide is None:
        return rounded_half(values, up=up)
    return torch.where(wide, values, rounded_half(values, up=up).float())


def rounded_half(values: torch.Tensor, *, up: bool) -> torch.Tensor:
    """Values in float16, rounded up or down, never to infinity."""
    rounded = values.to(torch.float16)
    wrong = rounded.float() < values if up else rounded.float() > values
    # The neighbour of a float16 is one step away in its bit pattern, which counts magnitudes.
    bits = rounded.view(torch.int16).to(torch.int32)
    negative = bits < 0
    magnitude = torch.where(negative, bits & 0x7FFF, bits)
    step = torch.where(negative, -1, 1) if up else torch.where(negative, 1, -1)
    moved = magnitude + step
    crossed = moved < 0  # from zero to the smallest number of the other sign
    sign = torch.where(negative ^ crossed, 0x8000, 0)
    neighbour = (torch.where(crossed, 1, moved) | sign).to(torch.int16).view(torch.float16)
    return torch.where(wrong & torch.isfinite(neighbour), neighbour, rounded)
