"""Codes whose inner products have no bias: Gaussian levels, and signs of random projections of the residual."""

import math
from functools import cache
from statistics import NormalDist

import torch

from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.quantizers.codebook import _HALF_MAX, _HALF_SMALL_SCALE, _LARGEST, CodebookQuantizer, _norm, _stored
from kvquant_hf.quantizers.levels import Levels, levels_of
from kvquant_hf.rotation import hashed
from kvquant_hf.spec import GROUP_SIZES

_SIZE = max(GROUP_SIZES)
# Entries of the projection are multiples of 2^-10, residuals are rounded to multiples of 2^-24 of their peak: sums of
# 128 products are then exact in float64, in any order, so that signs depend on the token alone.
_ENTRY_STEPS, _RESIDUAL_STEPS = 2.0**10, 2.0**24


class TurboProdQuantizer(CodebookQuantizer):
    """Gaussian levels with one bit less, and the sign of each coordinate of a random projection of what they miss.

    TurboQuant's `prod` variant (arXiv 2504.19874, section 3.2), with QJL (arXiv 2406.03482, section 3) for the
    residual. A token of `D` channels in the Hadamard basis and of norm `n` takes the nearest of the Gaussian levels of
    `nbits - 1` bits, times `n / sqrt(D)`. Of the residual `r` the norm `|r|` is stored, and with `S` a `D` by `D`
    matrix of independent standard normal numbers the signs of `S r`; they are the top bits of the codes, set where a
    coordinate is not negative. A token comes back as

        n / sqrt(D) · level + |r| · sqrt(π / 2) / D · Sᵀ sign

    **Inner products have no bias**: over the choice of `S` the second term has the mean `r`, and therefore the product
    of a token as it comes back with any query the mean of the true product. Levels alone shrink it: they lie inwards
    of what they stand for. The price is variance: with the second term an error of `sqrt(π / 2 - 1 / D) |r|`, 1.25
    `|r|`, remains, without it one of `|r|`, and this `|r|` is that of one bit less. Softmax amplifies variance and
    hardly feels a common factor of all scores: `turboquant` is the better use of the bits (`docs/results.md`).

    `S` is one fixed matrix, see `projection`, and `D` the size of a group: one group per token and head up to a head
    size of 128. `scale` holds `n / sqrt(D)` of the groups and then their `|r|`.
    """

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`; without `feedback`, which serves keys per channel."""
        if feedback is not None:
            raise ValueError("`feedback` serves keys per channel; `method='turboquant_prod'` stores tokens.")
        levels = levels_of(self.name, self.nbits - 1, rows.device)
        valid = self._valid(rows)
        fitted = self.grouped(rows if range_rows is None else range_rows)
        peak = fitted.abs().amax(-1, keepdim=True)
        peak = torch.where(peak > 0, peak, 1.0)
        norm = _norm(fitted / peak, valid)
        sigma = norm / self._sizes(fitted, valid) ** 0.5
        # The residual's norm may be a little larger than the token's.
        wide = (2 * norm * peak > _HALF_MAX) | ((sigma > 0) & (sigma * peak < _HALF_SMALL_SCALE))
        scale = _stored((sigma * peak).clamp_(max=_LARGEST), wide)
        codes, residual, reach = _nearest(levels, fitted / peak, scale / peak, valid)
        residual_norm = (_norm(residual, valid) * reach * peak).clamp_(max=_LARGEST)
        stored = torch.cat([scale, _stored(residual_norm, wide)], -1).transpose(-1, -2).flatten(-2)
        if range_rows is not None:
            even = (self.grouped(rows) / peak).clamp_(-_LARGEST, _LARGEST)
            codes, residual, _ = _nearest(levels, even, scale / peak, valid)
        codes = codes + (self._signs(residual, valid) << (self.nbits - 1))
        stored = stored.to(torch.float32 if bool(wide.any()) else torch.float16)
        return QuantizedGroups(codes.flatten(-2)[..., : rows.shape[-1]], stored, None)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        levels = levels_of(self.name, self.nbits - 1, groups.codes.device)
        length = groups.codes.shape[-1]
        codes, valid = self.grouped(groups.codes), self._valid(groups.codes)
        scale, residual_norm = groups.scale.float().chunk(2, -1)
        values = levels.values(codes & (2 ** (self.nbits - 1) - 1)).mul_(scale[..., None])
        signs = (codes >> (self.nbits - 1)).double().mul_(2).sub_(1)
        projected = self._projected(signs, valid, transpose=True)
        share = math.sqrt(math.pi / 2) / self._sizes(projected, valid)
        correction = (projected.float() * share).mul_(residual_norm[..., None])
        for part in (values, correction):  # infinities of opposite sign have no sum
            part.clamp_(-_LARGEST, _LARGEST)
        return values.add_(correction).clamp_(-_LARGEST, _LARGEST).flatten(-2)[..., :length]

    def _sizes(self, groups: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor | int:
        """Elements of each group, `[groups, 1]` where they differ."""
        return groups.shape[-1] if valid is None else valid.sum(-1, keepdim=True)

    def _signs(self, residual: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Signs of the projected residuals, uint8: 1 where not negative; `residual` `[..., n]`, up to 1 in size."""
        steps = (residual.double() * _RESIDUAL_STEPS).round_()
        return (self._projected(steps, valid, transpose=False) >= 0).to(torch.uint8)

    def _projected(self, groups: torch.Tensor, valid: torch.Tensor | None, *, transpose: bool) -> torch.Tensor:
        """Groups `[..., n]`, float64, times the projection; of short groups times its upper left corner."""
        matrix = projection(groups.device)[: self.group_size, : self.group_size]
        if valid is not None:
            groups = groups * valid
        return groups @ (matrix if transpose else matrix.T)


def _nearest(
    levels: Levels, even: torch.Tensor, scale: torch.Tensor, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of groups and what they miss.

    Args:
        levels: Table.
        even: `[..., n]`, groups over their peaks.
        scale: `[..., 1]`, stored scales likewise.
        valid: See `_valid`.

    Returns:
        Codes, the residuals over their largest size, and that size `[..., 1]`, 1 where there is no residual.
    """
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1 / scale, 0)
    codes = levels.nearest((even * inverse).clamp_(-_LARGEST, _LARGEST))
    residual = even - levels.values(codes).mul_(scale)
    sizes = residual.abs() if valid is None else residual.abs().mul_(valid)
    reach = sizes.amax(-1, keepdim=True)
    reach = torch.where(reach > 0, reach, 1.0)
    return codes, residual / reach, reach


@cache
def projection(device: torch.device) -> torch.Tensor:
    """`S`, `[128, 128]`, float64: standard normal numbers, the same in every layer, process and version.

    Entry `(i, j)` is the quantile of the standard normal distribution at `(h(128 · i + j + 1) + 1/2) / 2^32`, rounded
    to a multiple of 2^-10. `h(k) = g(g(k) + 0x9E3779B9 mod 2^32)`, with `g` the 32-bit finalizer of MurmurHash3 that
    `kvquant_hf.rotation.signs` describes.
    """
    with torch.inference_mode(False):
        quantile = NormalDist().inv_cdf
        hashes = [hashed((hashed(place + 1) + 0x9E3779B9) & 0xFFFFFFFF) for place in range(_SIZE * _SIZE)]
        numbers = [quantile((number + 0.5) / 2**32) for number in hashes]
        matrix = torch.tensor(numbers, dtype=torch.float64).mul_(_ENTRY_STEPS).round_().div_(_ENTRY_STEPS)
        return matrix.view(_SIZE, _SIZE).to(device)
