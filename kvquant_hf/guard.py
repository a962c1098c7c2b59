"""The outlier guard: layers whose keys have extreme channels are stored in more bits.

A runtime check instead of a calibration: the first block of keys that a layer quantizes tells how its channels are
spread, and by that, once, how the keys of the layer are stored. Nothing is quantized twice, and a layer that the guard
widens holds exactly what a cache with those settings for that layer would hold. Queries have no say: a cache gets the
keys of a prompt before attention gets its queries, and quantizes them then. What queries make of errors is measured
offline (`scripts/calibrate.py`, `scripts/query_moments.py`).
"""

from dataclasses import replace

import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.padding import without_padding
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import rotate_bounded
from kvquant_hf.spec import NORM_METHODS, QuantSpec

# Bits of a code, plain and guarded.
_WIDER = {2: 4, 3: 4, 4: 8}
# The smallest positive float32: a head without any spread has the imbalance 0.
_TINY = torch.finfo(torch.float32).tiny


def guarded(spec: QuantSpec) -> QuantSpec:
    """Storage of the keys of a guarded layer: 4 bits instead of 2 or 3, 8 instead of 4.

    Levels that do not serve the wider codes, as no listed ones do, give way to evenly spaced ones.

    Raises:
        ValueError: The method has no wider codes.
    """
    nbits = _WIDER.get(spec.nbits, spec.nbits)
    if nbits == 8 != spec.nbits and spec.method in NORM_METHODS:
        raise ValueError(
            f"`outlier_guard` must be None for keys of {spec.nbits} bits with `method={spec.method!r}`, which has no "
            f"wider codes."
        )
    serves = isinstance(spec.levels, str) and nbits in spec.levels_nbits
    if nbits == spec.nbits or serves or spec.method != "affine":
        return replace(spec, nbits=nbits)
    return replace(spec, nbits=nbits, levels="uniform")


def imbalance(blocks: torch.Tensor) -> torch.Tensor:
    """How much wider the widest channel of each head is than its median channel.

    Args:
        blocks: `[B, H, L, D]`, float32, finite: keys in the basis in which they are quantized.

    Returns:
        `[B, H]`, float32, 0 or at least 1: the largest over the median range of a channel, a range being the largest
        less the smallest number of its `L`. The median of an even number of channels is the lower of the middle two.
    """
    # Halved first: the difference of two large numbers of opposite sign may not be finite.
    ranges = (blocks / 2).amax(2) - (blocks / 2).amin(2)
    widest, median = ranges.amax(-1), ranges.median(-1).values
    return torch.where(widest > 0, widest / median.clamp(min=_TINY), 0.0)


def storage_of_keys(
    config: KVQuantConfig,
    key_states: torch.Tensor,
    rotation: KeyRotation | None,
    padding: torch.Tensor | None,
) -> QuantSpec:
    """How a layer stores its keys, decided by the block that is quantized first.

    The largest imbalance of all heads and rows counts. A row whose part of the block is padding has no say.

    Args:
        config: Settings of the layer.
        key_states: `[B, H, L, D]` of the slots `sink_length … sink_length + L - 1`, as the model rotates them.
        rotation: The rotary embedding that is undone before keys are stored, or `None`.
        padding: Left padding of each row, `[B]`, int64, or `None` without any.

    Returns:
        `config.key`, or `guarded(config.key)` where the imbalance exceeds `config.outlier_guard`.
    """
    if config.outlier_guard is None or not config.key.is_quantized:
        return config.key
    slot, length = config.sink_length, config.block_length
    blocks = key_states[:, :, None].float()
    if rotation is not None:
        cos, sin = rotation.block_tables(slot, 1, length, blocks.device)
        blocks = rotation.apply(blocks, cos, sin, inverse=True)
    if padding is not None:
        blocks = without_padding(blocks, slot, padding, slot)
    blocks = blocks[:, :, 0]
    found = imbalance(rotate_bounded(blocks, config.key.rotation, config.key.channel_order))
    if padding is not None:
        found = torch.where((padding < length)[:, None], found, 0.0)
    return guarded(config.key) if bool((found > config.outlier_guard).any()) else config.key
