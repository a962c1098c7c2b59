"""Codes of FP4 with scales of FP8: `x ≈ base · e4m3(scale byte) / 448 · e2m1(code)`."""

import torch

from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.codebook import _CLIP_SHARES, CodebookQuantizer, _codes, _values
from kvquant_hf.quantizers.levels import Levels, levels_of
from kvquant_hf.quantizers.sums import sum_by_halves

_HALF_MAX, _HALF_NORMAL = 65504.0, 2.0**-14
_LARGEST_BYTE = 0x7E  # 448; the next pattern is no number


class MicroscaledQuantizer(CodebookQuantizer):
    """Symmetric codes of `CodebookQuantizer` whose scales are e4m3 numbers, relative to one number of the block.

    NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 2): numbers of `e2m1` in
    groups of 16, a scale of `e4m3` for each, and a second-level scale of higher precision that brings the largest
    scale to 448. The second level is one float32 number of a tensor there, here one of a block and head, float16 where
    that holds it. What is stored is its product with 448, the largest scale itself: the number alone would often lie
    below what float16 holds with all its digits.

    Scales are rounded to the nearest `e4m3`, but never so far down that the largest number of the group is cut by more
    than the scale: a number is therefore off by at most one stored scale, half the widest gap between levels. This
    matters for scales below 2^-6 of the 448, where `e4m3` loses digits. Below 2^-9, a 229,376th of the largest scale
    of the block, a group takes 2^-9: its numbers come back as multiples of half of that, those of at most a quarter of
    it as zero. A group of zeros comes back as zeros. With `clip="mse"` all scales tried are such that can be stored.
    """

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`; scales are bytes, the bits of their `e4m3` numbers."""
        levels = levels_of(self.name, self.nbits, rows.device)
        groups = self.grouped(rows)
        fitted = groups if range_rows is None else self.grouped(range_rows)
        needed = fitted.abs().amax(-1) / levels.reach
        base, is_half = _base(needed)
        scale_codes = _scale_codes(needed, base, levels)
        if self.clip == "mse":
            scale_codes = _clipped(levels, fitted, self._valid(rows), needed, base, scale_codes)
        codes = self.codes_of_groups(groups, _scales(scale_codes, base), None, feedback)
        second_level = base.squeeze(-1)
        return QuantizedGroups(
            codes.flatten(-2)[..., : rows.shape[-1]],
            scale_codes,
            None,
            second_level=second_level.half() if bool(is_half.all()) else second_level,
        )

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        levels = levels_of(self.name, self.nbits, groups.codes.device)
        length = groups.codes.shape[-1]
        values = _values(levels, self.grouped(groups.codes), self.expanded(groups), None)
        return values.flatten(-2)[..., :length]

    def expanded(self, groups: QuantizedGroups) -> torch.Tensor:
        """Scales of the groups, `[..., rows, num_groups]`, float32."""
        assert groups.second_level is not None
        return _scales(groups.scale, groups.second_level.float()[..., None])


def _base(needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest finite scale of each block as it is stored, and where float16 holds it: `[..., 1, 1]`."""
    base = torch.where(torch.isfinite(needed), needed, 0.0).amax((-2, -1), keepdim=True)
    is_half = (base == 0) | ((base >= _HALF_NORMAL) & (base <= _HALF_MAX))
    return torch.where(is_half, base.clamp(max=_HALF_MAX).half().float(), base), is_half


def _scale_codes(needed: torch.Tensor, base: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Bytes of scales `[..., rows, groups]`, uint8, see `MicroscaledQuantizer`."""
    formats = levels_of("e4m3", 8, needed.device)
    codes = formats.nearest(needed / torch.where(base > 0, base, 1.0) * formats.reach)
    too_small = needed * levels.reach > _scales(codes, base) * (levels.reach + 1)
    return (codes + too_small).clamp_(max=_LARGEST_BYTE).to(torch.uint8)


def _scales(codes: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Scales that bytes stand for, float32, of bases `[..., 1, 1]`."""
    formats = levels_of("e4m3", 8, codes.device)
    return formats.values(codes) / formats.reach * base


def _clipped(
    levels: Levels,
    groups: torch.Tensor,
    valid: torch.Tensor | None,
    needed: torch.Tensor,
    base: torch.Tensor,
    best_codes: torch.Tensor,
) -> torch.Tensor:
    """Bytes of the scales of least squared error among `_CLIP_SHARES` of what groups need."""
    best = torch.full_like(needed, torch.inf)
    unit = torch.where(needed >= torch.finfo(torch.float32).tiny, needed, 1.0)[..., None]
    for share in _CLIP_SHARES:
        tried = _scale_codes(share * needed, base, levels)
        scale = _scales(tried, base)
        errors = _values(levels, _codes(levels, groups, scale, None), scale, None).sub_(groups).div_(unit).square_()
        error = sum_by_halves(errors if valid is None else errors.mul_(valid), -1).squeeze(-1)
        better = error < best
        best = torch.where(better, error, best)
        best_codes = torch.where(better, tried, best_codes)
    return best_codes
