"""Channel promotion: the channels of widest range get two more bits."""

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.spec import EXTRA_BITS, QuantSpec, channel_number_bits


class PromotedQuantizer:
    """Affine codes of `nbits` bits, and of two more for a share of the rows of every block: those of widest range.

    The error of a key channel is in proportion to its range, and a few channels have many times the range of the
    others (Kitty, arXiv 2511.18643, promotes an eighth or a quarter of the channels from 2 to 4 bits). Two more bits
    divide a channel's error by four to five. Where keys are stored before RoPE both channels of a rotary pair are
    promoted together, since RoPE mixes what they are off by.

    Args:
        spec: Settings; `spec.promoted` is the share.
        partners: `[D]`, int64: the channel that each channel is rotated with, itself where it is not rotated; `None`
            if keys are not rotated after reading.
    """

    def __init__(self, spec: QuantSpec, partners: torch.Tensor | None = None) -> None:
        self._spec = spec
        self._partners = partners
        self._plain = AffineQuantizer(spec)
        self._fine = AffineQuantizer(spec, spec.nbits + EXTRA_BITS)

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`; each row is a channel."""
        fitted = self._plain.grouped(rows if range_rows is None else range_rows)
        promoted = self.widest(fitted)
        chosen = torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        chosen.scatter_(-1, promoted.long(), True)
        scale, zero_point = self._plain.fit(fitted)
        fine_scale, fine_zero = self._fine.fit(fitted)
        assert zero_point is not None and fine_zero is not None
        dtype = torch.promote_types(scale.dtype, fine_scale.dtype)
        scale = torch.where(chosen[..., None], fine_scale.to(dtype), scale.to(dtype))
        zero_point = torch.where(chosen[..., None], fine_zero.to(dtype), zero_point.to(dtype))
        most = torch.where(chosen, self._fine.levels, self._plain.levels).float()
        codes = self._plain.codes_up_to(most, self._plain.grouped(rows), scale, zero_point, feedback)
        return QuantizedGroups(codes.flatten(-2)[..., : rows.shape[-1]], scale, zero_point, promoted=promoted)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        return self._plain.dequantize(groups)

    def widest(self, groups: torch.Tensor) -> torch.Tensor:
        """Rows to promote, `[..., P]` of `number_dtype`, ascending, of groups `[..., rows, groups, n]`."""
        # The widest group counts: a maximum depends on no order, as a sum would.
        spread = (groups.amax(-1) - groups.amin(-1)).amax(-1)
        if self._partners is not None:
            other = spread.index_select(-1, self._partners.to(spread.device))
            spread = spread.square() + other.square()
        count = self._spec.num_promoted(groups.shape[-3])
        order = spread.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return order.sort(dim=-1).values.to(number_dtype(groups.shape[-3]))


def number_dtype(rows: int) -> torch.dtype:
    """Dtype of the numbers of that many rows."""
    return {8: torch.uint8, 16: torch.int16}[channel_number_bits(rows)]


def split_codes(codes: torch.Tensor, promoted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes that all have the same width, and the low bits of promoted rows.

    Args:
        codes: `[..., rows, length]`, uint8.
        promoted: `[..., P]`: rows whose codes are wider.

    Returns:
        Codes with the high bits alone in promoted rows, and the low bits `[..., P, length]`.
    """
    index = along(promoted, codes)
    whole = codes.gather(-2, index)
    return codes.scatter(-2, index, whole >> EXTRA_BITS), whole & (2**EXTRA_BITS - 1)


def join_codes(codes: torch.Tensor, low: torch.Tensor, promoted: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_codes`."""
    index = along(promoted, codes)
    return codes.scatter(-2, index, (codes.gather(-2, index) << EXTRA_BITS) | low)


def along(promoted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Numbers of rows `[..., P]` as an index `[..., P, length]` into `[..., rows, length]`."""
    return promoted.long()[..., None].expand(*promoted.shape, rows.shape[-1])
