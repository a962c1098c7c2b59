"""The guards: layers whose keys two bits serve badly are stored in more.

Runtime checks instead of a calibration. The first block of keys that a layer quantizes tells, once, how all keys of
the layer are stored: by how unevenly its channels are spread (`outlier_guard`), by how far its error moves what
attention gives to the last queries before it is quantized (`attention_guard`), or by both. A layer that is widened
holds exactly what a cache with those settings for that layer would hold.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.padding import without_padding
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import rotate_bounded
from kvquant_hf.spec import NORM_METHODS, QuantSpec

# Bits of a code, plain and guarded.
_WIDER = {2: 4, 3: 4, 4: 8}
_UNSEEN = (
    "`attention_guard` has no say where attention does not show the cache its queries (flash attention, models that "
    "expand what they store, keys that need gradients or are fed without attention, a cache cut back into its first "
    "block): `outlier_guard` decides alone there, and without it the layer is stored as `key` says. Otherwise "
    "attention by 'sdpa', 'eager' and 'kvquant' shows them."
)
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
            f"`outlier_guard` and `attention_guard` must be None for keys of {spec.nbits} bits with "
            f"`method={spec.method!r}`, which has no wider codes."
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


def output_error(
    query: torch.Tensor,
    key: torch.Tensor,
    read: torch.Tensor,
    value: torch.Tensor,
    first: int,
    padding: torch.Tensor | None,
) -> torch.Tensor:
    """How far a change of keys moves what attention gives to each row.

    `‖A·V - Â·V‖ / ‖A·V‖` over the queries, mean of heads. Of the scores only `q·k` counts: position biases, caps and
    learned sinks that some models add are left out.

    Args:
        query: `[B, H_q, N, D]` of the slots `first … first + N - 1`, times the factor of the scores.
        key: Exact keys of the slots `0 … T - 1`, `T = first + N`, `[B, H, T, D]`.
        read: The keys that give Â, likewise.
        value: Exact values, `[B, H, T, D_v]`.
        first: Slot of the first query.
        padding: Left padding of each row, `[B]`, int64, or `None` without any.

    Returns:
        `[B]`, float32; 0 for a row whose queries are all padding.
    """
    slots = torch.arange(key.shape[2], device=key.device)
    asking = slots[first:]
    hidden = (slots > asking[:, None])[None]  # [B | 1, N, T]
    counts = torch.ones(1, asking.numel(), device=key.device)
    if padding is not None:
        counts = (asking >= padding[:, None]).float()
        hidden = hidden | ((slots < padding[:, None])[:, None] & (counts > 0)[..., None])
    queries = query.float().unflatten(1, (key.shape[1], -1))

    def probabilities(states: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = queries @ states.float()[:, :, None].transpose(-1, -2)
        return scores.masked_fill(hidden[:, None, None], torch.finfo(torch.float32).min).softmax(-1)

    exact, values = probabilities(key), value.float()[:, :, None]
    output, moved = (
        torch.linalg.vector_norm((part @ values) * counts[:, None, None, :, None], dim=(-1, -2))
        for part in (exact, exact - probabilities(read))
    )
    shares = torch.where(output > 0, moved / output.clamp(min=_TINY), 0.0)
    return shares.mean((1, 2))


def storage_of_keys(
    config: KVQuantConfig,
    key_states: torch.Tensor,
    rotation: KeyRotation | None,
    padding: torch.Tensor | None,
    error: Callable[[], torch.Tensor] | None = None,
) -> QuantSpec:
    """How a layer stores its keys, decided by the block that is quantized first.

    The largest imbalance of all heads and rows counts, and the largest error of all rows. A row whose part of the
    block is padding has no say.

    Args:
        config: Settings of the layer.
        key_states: `[B, H, L, D]` of the slots `sink_length … sink_length + L - 1`, as the model rotates them.
        rotation: The rotary embedding that is undone before keys are stored, or `None`.
        padding: Left padding of each row, `[B]`, int64, or `None` without any.
        error: Gives what `output_error` finds for keys stored as `config.key` says; `None` where attention did not
            show its queries. `attention_guard` then has no say, and a warning says so.

    Returns:
        `config.key`, or `guarded(config.key)` where every limit that the settings give is exceeded.
    """
    if not config.has_guard:
        return config.key
    if config.outlier_guard is not None:
        found = _imbalance_of_keys(config, key_states, rotation, padding)
        if not _exceeds(found, config.outlier_guard, config, padding):
            return config.key
    if config.attention_guard is not None:
        if error is None:
            warnings.warn(_UNSEEN, stacklevel=2)
            return config.key if config.outlier_guard is None else guarded(config.key)
        if not _exceeds(error()[:, None], config.attention_guard, config, padding):
            return config.key
    return guarded(config.key)


def _imbalance_of_keys(
    config: KVQuantConfig, key_states: torch.Tensor, rotation: KeyRotation | None, padding: torch.Tensor | None
) -> torch.Tensor:
    """`imbalance` in the basis in which keys `[B, H, L, D]` are quantized, padding left out: `[B, H]`."""
    slot, length = config.sink_length, config.block_length
    blocks = key_states[:, :, None].float()
    if rotation is not None:
        cos, sin = rotation.block_tables(slot, 1, length, blocks.device)
        blocks = rotation.apply(blocks, cos, sin, inverse=True)
    if padding is not None:
        blocks = without_padding(blocks, slot, padding, slot)
    return imbalance(rotate_bounded(blocks[:, :, 0], config.key.rotation, config.key.channel_order))


def _exceeds(found: torch.Tensor, limit: float, config: KVQuantConfig, padding: torch.Tensor | None) -> bool:
    """Whether figures `[B, …]` exceed a limit in a row whose part of the first block is not all padding."""
    if padding is not None:
        found = found[padding < config.block_length]
    return bool((found > limit).any())
