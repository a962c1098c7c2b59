"""The queries by which a layer's guard judges: those of the last tokens before the first block is quantized."""

import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.window import ExactTokens

# Fewer are a noisier sample, more lie further from the end.
_MOST = 32
# Tokens between the last of them and the one with which the block falls due, as far as the residual window is long:
# so many guesses of speculative decoding may be taken back without having been judged by.
_MARGIN = 32


class LastQueries:
    """Scaled queries of up to 32 tokens, collected as calls of attention bring them.

    A first block is quantized as soon as slot `S + L + R - 1` (sinks, block, residual window) is filled. The queries
    are those of slots shortly before it, which lie behind the layer when tokens come one by one and are part of a
    longer prompt, so that they are the same ones however calls cut the tokens.

    Args:
        config: Settings of the layer.
    """

    def __init__(self, config: KVQuantConfig) -> None:
        due = config.sink_length + config.block_length + config.residual_length - 1
        self.end = due - min(_MARGIN, config.residual_length // 2)
        self.first = max(0, self.end - _MOST)
        self.window = ExactTokens(self.end - self.first)

    def wants(self, slot: int, tokens: int) -> bool:
        """Whether queries of some of the `tokens` tokens from `slot` on are to be taken."""
        return max(slot, self.first) < min(slot + tokens, self.end)

    @property
    def is_complete(self) -> bool:
        """Whether attention has shown all of them."""
        return self.first + self.window.length == self.end

    @property
    def query(self) -> torch.Tensor | None:
        """`[B, H_q, N, D]` of the slots `first … end - 1`, times the factor of the scores; `None` unless complete."""
        return self.window.view() if self.is_complete else None

    def take(self, query: torch.Tensor, slot: int, scale: float) -> None:
        """Keep what is wanted of queries of the slots from `slot` on.

        Nothing is kept where some before are missing, or where those had other heads.

        Args:
            query: `[B, H_q, t, D]`.
            slot: Slot of the first of them.
            scale: Factor of the scores.
        """
        held, kept = self.first + self.window.length, self.window.view()
        follows = slot <= held < min(slot + query.shape[2], self.end)
        if follows and (kept is None or kept.shape[1] == query.shape[1]):
            self.window.append(query[:, :, held - slot : self.end - slot] * scale)

    def truncate(self, length: int) -> None:
        """Forget the queries of the slots from `length` on."""
        self.window.truncate(max(0, length - self.first))


def by_token(query: torch.Tensor, key_shape: torch.Size, tokens: int) -> torch.Tensor | None:
    """Queries of attention over keys as `[B, H_q, t, D]`, or `None` where they are of another form.

    Args:
        query: Of that shape, or `[B, H, H_q / H, D]` of one token, as Transformers packs the heads that share keys.
        key_shape: `[B, H, T, D]`.
        tokens: Tokens whose queries they should be, `t`.
    """
    batch_size, heads, _, head_dim = key_shape
    if query.ndim != 4 or query.shape[0] != batch_size or query.shape[3] != head_dim or query.shape[1] % heads:
        return None
    if query.shape[2] == tokens:
        return query
    return query.flatten(1, 2)[:, :, None] if tokens == 1 and query.shape[1] == heads else None
