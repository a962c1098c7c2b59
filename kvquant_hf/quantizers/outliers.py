"""Dense and sparse: the entries that widen ranges most are kept exact beside the codes."""

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import Outliers, QuantizedGroups
from kvquant_hf.quantizers.codebook import CodebookQuantizer
from kvquant_hf.spec import QuantSpec

# A group gives up at most this part of its entries, one in so many.
_LEAST_SHARE = 8
_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-14
# Blocks of up to so many entries have places of 16 bits.
_SHORT_PLACES = 2**16


class OutlierQuantizer:
    """Codes, of even or uneven levels, beside a fixed number of entries of each block that are stored as they are.

    KVQuant (arXiv 2401.18079, section 3.4) keeps the numerical outliers of every channel of keys and every token of
    values apart, one entry in a hundred, and fits ranges to the rest. Here they are found block by block, at no
    calibration: a group of range `R` has squared errors in proportion to `R²`, so the entries of the block are spent
    where they lower the sum of `R²` over its groups most. The range that `j` entries less leave to a group is that of
    the narrowest run of its sorted entries; the decrements of `R²`, evened out to their least concave majorant (a pair
    of like outliers pays only together), are sorted over all groups, and the largest are taken. This depends on the
    entries of the block alone, and on their order only where two of them are equal.

    An outlier is off by its rounding to float16 only: 2^-11 of its size, or 2^-25. Blocks with outliers above 65,504,
    or none above 2^-14, have float32 ones. All other entries are as `AffineQuantizer` or `CodebookQuantizer` have them
    in the range that is left.

    Args:
        spec: Settings; `spec.outliers` is the share.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self._spec = spec
        self._plain = AffineQuantizer(spec) if spec.levels == "uniform" else CodebookQuantizer(spec)

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of blocks `[..., rows, length]`, see `Quantizer.quantize`."""
        plain, entries = self._plain, rows.shape[-2] * rows.shape[-1]
        fitted = rows if range_rows is None else range_rows
        finite = torch.nan_to_num(fitted, nan=torch.finfo(fitted.dtype).max)
        exact, nearest = self._split(finite, self._spec.num_outliers(entries))
        places = exact.flatten(-2).nonzero()[:, -1].view(*rows.shape[:-2], -1)
        outliers = Outliers(_stored_places(places, entries), _stored_values(rows.flatten(-2).gather(-1, places)))
        scale, zero_point = plain.fit_rows(torch.where(exact, nearest, fitted))
        codes = plain.codes_of_rows(torch.where(exact, nearest, rows), scale, zero_point, feedback, exact)
        return QuantizedGroups(codes, scale, zero_point, outliers=outliers)

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
        values = self._plain.dequantize(groups)
        assert groups.outliers is not None
        places, exact = places_of(groups.outliers.places), groups.outliers.value.float()
        return values.flatten(-2).scatter(-1, places, exact).view(values.shape)

    def _split(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where outliers are, and the nearest value that their groups keep.

        Args:
            rows: `[..., rows, length]`, float32, finite.
            count: Outliers of a block, `K`.

        Returns:
            `[..., rows, length]` both: bool, true `K` times in a block; float32, of use where that is true.
        """
        size, length = self._plain.group_size, rows.shape[-1]
        keys = self._sort_keys(rows)
        ranked, order = keys.sort(dim=-1, stable=True)
        spans, low_ends = _spans(ranked, self._plain.symmetric)
        removed = _allotted(spans, length - (keys.shape[-2] - 1) * size, count)[..., None]
        first = low_ends.gather(-1, removed)
        last = first + size - 1 - removed
        rank = torch.arange(size, device=rows.device)
        exact = torch.zeros_like(keys, dtype=torch.bool).scatter(-1, order, (rank < first) | (rank > last))
        low, high = ranked.gather(-1, first), ranked.gather(-1, last)
        if self._plain.symmetric:
            high = high.clamp_min(0.0)
            low = -high
        low, high = (bound.expand(keys.shape).flatten(-2)[..., :length] for bound in (low, high))
        return exact.flatten(-2)[..., :length], rows.clamp(low, high)

    def _sort_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """What narrows a range when it is taken from an end, `[..., num_groups, group_size]`.

        What fills a short last group must never be taken: it lies in the middle, of sizes at the lower end.
        """
        size, length = self._plain.group_size, rows.shape[-1]
        keys = rows.abs() if self._plain.symmetric else rows
        missing = -length % size
        if missing:
            short = keys[..., length + missing - size :]
            filler = torch.full_like(short[..., :1], -1.0)
            if not self._plain.symmetric:
                filler = short.sort(dim=-1).values[..., (short.shape[-1] - 1) // 2, None]
            keys = torch.cat([keys, filler.expand(*filler.shape[:-1], missing)], -1)
        return keys.reshape(*keys.shape[:-1], -1, size)


def places_of(index: torch.Tensor) -> torch.Tensor:
    """Places of outliers as `Outliers.places` stores them, int64."""
    places = index.long()
    return places.bitwise_and_(_SHORT_PLACES - 1) if index.dtype == torch.int16 else places


def check_places(index: torch.Tensor, entries: int) -> None:
    """Raise unless stored places `[..., K]` are those of outliers of blocks of so many entries.

    Raises:
        ValueError: They are not.
    """
    places = places_of(index)
    if bool((places < 0).any()) or bool((places >= entries).any()) or bool((places.diff(dim=-1) <= 0).any()):
        raise ValueError(f"stored `outlier_index` must be ascending places below {entries}.")


def _stored_places(places: torch.Tensor, entries: int) -> torch.Tensor:
    return places.to(torch.int16 if entries <= _SHORT_PLACES else torch.int32)


def _stored_values(values: torch.Tensor) -> torch.Tensor:
    """Outliers `[..., K]` in float16; in float32 if a block needs it, the others rounded all the same."""
    size = values.abs()
    largest = size.amax(-1, keepdim=True)
    wide = (size > _HALF_MAX).any(-1, keepdim=True) | ((largest > 0) & (largest < _HALF_TINY))
    half = values.half()
    return torch.where(wide, values, half.float()) if bool(wide.any()) else half


def _spans(ranked: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges that are left to groups when `j = 0 … J` entries are taken from them.

    Args:
        ranked: `[..., n]`, ascending: entries, or their sizes if symmetric.
        symmetric: Whether only the largest are taken, or entries from both ends.

    Returns:
        The narrowest ranges, `[..., J + 1]`, float64, whose squares are finite; how many of the `j` entries are taken
        from the lower end, int64.
    """
    most = ranked.shape[-1] // _LEAST_SHARE
    ends = ranked.double()
    bottom, top = ends[..., : most + 1], ends[..., ends.shape[-1] - most - 1 :].flip(-1)
    if symmetric:
        return top.clamp_min(0.0), torch.zeros_like(top, dtype=torch.int64)
    spans, low_ends = [], []
    for j in range(most + 1):
        # Entry k: k of the upper end. The fewest win ties, since fillers come last among equals.
        ranges = top[..., : j + 1] - bottom[..., : j + 1].flip(-1)
        least = ranges.amin(-1, keepdim=True)
        spans.append(least)
        low_ends.append(j - (ranges == least).to(torch.uint8).argmax(-1, keepdim=True))
    return torch.cat(spans, -1), torch.cat(low_ends, -1)


def _allotted(spans: torch.Tensor, last_size: int, count: int) -> torch.Tensor:
    """How many entries each group gives up.

    Args:
        spans: `[..., rows, groups, J + 1]`, float64, see `_spans`.
        last_size: Entries of the last group of a row.
        count: Entries to give up in all of a block, `K`.

    Returns:
        `[..., rows, groups]`, int64, `K` in all.
    """
    gain = spans[..., :1].square() - spans.square()
    most = spans.shape[-1] - 1
    # Slopes of the least concave majorant of the gain: from the lowest start, up to the best end.
    worth = torch.full_like(gain[..., 1:], torch.inf)
    steps = torch.arange(1, most + 1, device=spans.device)
    for start in range(most):
        ahead = (gain[..., start + 1 :] - gain[..., start, None]) / steps[: most - start]
        best = ahead.flip(-1).cummax(-1).values.flip(-1)
        worth[..., start:] = torch.minimum(worth[..., start:], best)
    worth[..., -1, max(1, (last_size - 1) // 2) :] = -1.0
    order = worth.flatten(-3).argsort(dim=-1, descending=True, stable=True)[..., :count]
    chosen = torch.zeros_like(worth.flatten(-3), dtype=torch.int64).scatter(-1, order, 1)
    return chosen.view(worth.shape).sum(-1)
