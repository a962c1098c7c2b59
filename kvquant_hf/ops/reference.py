"""The fused operation in plain PyTorch: the fp32 twin that every kernel is judged by, and the fallback."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvquant_hf.view import KVView


def decode_attention(query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Tiled attention with an online softmax, see `kvquant_hf.ops.decode_attention`.

    Args:
        query: `[B, H_q, q_len, D]`.
        view: Layer contents.
        mask: `[B|1, H_q|1, q_len|1, T]`, boolean or additive, or `None`.
        scale: Factor of the scores.

    Returns:
        `[B, H_q, q_len, D_v]`, the dtype of `query`.
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads = view.key_shape[1]
    # The query heads of one key/value head are its rows: K and V are never repeated.
    rows = (query.float() * scale).reshape(batch_size, num_kv_heads, -1, head_dim)
    folded: torch.Tensor | None = None
    value_dim = view.value_shape[3]
    peak = rows.new_full((*rows.shape[:3], 1), float("-inf"))
    total = torch.zeros_like(peak)
    # Sums of values in the plain and in the Hadamard basis, kept apart until the end.
    sums = [rows.new_zeros(*rows.shape[:3], value_dim) for _ in range(2)]
    any_rotated = False
    for tile in view.tiles(fold_rotations=True):
        left = rows
        if tile.rotated_keys:
            folded = view.fold_query(rows) if folded is None else folded
            left = folded
        scores = left @ tile.keys.float().transpose(-1, -2)
        if mask is not None:
            scores = _masked(scores, mask[..., tile.first : tile.last], num_heads, q_len)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # A row that has met no attended token yet has peak -inf, and -inf - -inf is not a number.
        anchor = torch.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = torch.exp(scores - anchor)
        decay = torch.exp(peak - anchor)
        total = total * decay + weights.sum(-1, keepdim=True)
        sums = [part * decay for part in sums]
        sums[tile.rotated_values] += weights @ tile.values.float()
        any_rotated |= tile.rotated_values
        peak = new_peak
    output = sums[0] + view.unfold_output(sums[1]) if any_rotated else sums[0]
    output = torch.where(total > 0, output / total, 0.0)
    return output.reshape(batch_size, num_heads, q_len, value_dim).to(query.dtype)


def _masked(scores: torch.Tensor, mask: torch.Tensor, num_heads: int, q_len: int) -> torch.Tensor:
    """Scores `[B, H, rows, t]` with a mask `[B|1, H_q|1, q_len|1, t]` applied."""
    batch_size, num_kv_heads, _, length = scores.shape
    split = scores.view(batch_size, num_kv_heads, num_heads // num_kv_heads, q_len, length)
    if mask.shape[1] == num_heads:
        mask = mask.reshape(mask.shape[0], num_kv_heads, -1, *mask.shape[2:])
    else:
        mask = mask[:, :, None]
    split = split.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else split + mask.float()
    return split.view(scores.shape)
