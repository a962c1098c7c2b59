"""Tokens kept exactly as they came: the residual window of one side of a cache layer."""

import torch

from kvquant_hf.buffers import GROWTH_SHARE, TensorMap, with_capacity

_CHUNK = 32


class ExactTokens:
    """Tokens kept as they came, in a buffer that grows in chunks and drops from the front.

    Args:
        limit: Tokens beyond which no spare room is made, or `None`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.length = 0
        self.buffer: torch.Tensor | None = None

    def append(self, states: torch.Tensor) -> None:
        """Add tokens `[B, H, t, D]` at the end."""
        needed = self.length + states.shape[2]
        if self.buffer is not None and self.buffer.shape[2] >= needed:
            self.buffer.narrow(2, self.length, needed - self.length).copy_(states)
            self.length = needed
            return
        capacity = _chunk(needed) if self.limit is None else min(_chunk(needed), max(needed, self.limit))
        self.buffer = with_capacity(self.buffer, states, self.length, needed, capacity - needed)
        self.buffer[:, :, self.length : needed] = states
        self.length = needed

    def replace(self, states: torch.Tensor) -> None:
        """Hold exactly the tokens `[B, H, t, D]`, copied; the buffer stays where it is if they fit into it."""
        if self.limit is None or self.buffer is None or self.buffer.shape[2] > self.limit:
            self.buffer = None
        self.length = 0
        self.append(states)

    def drop_front(self, count: int) -> None:
        """Forget the oldest `count` tokens."""
        assert self.buffer is not None
        kept = self.buffer[:, :, count : self.length].clone()
        self.length -= count
        self.buffer[:, :, : self.length] = kept

    def truncate(self, length: int) -> None:
        """Forget all but the oldest `length` tokens."""
        self.length = min(self.length, length)

    def view(self) -> torch.Tensor | None:
        """The tokens, `[B, H, length, D]`, a view of the buffer; `None` before the first."""
        return None if self.buffer is None else self.buffer[:, :, : self.length]

    def map(self, function: TensorMap) -> None:
        """Replace the buffer by what `function` makes of it."""
        if self.buffer is not None:
            self.buffer = function(self.buffer)

    def bytes_used(self) -> int:
        """Bytes of the tokens held."""
        tokens = self.view()
        return 0 if tokens is None else tokens.numel() * tokens.element_size()

    def bytes_held(self) -> int:
        """Bytes of the buffer."""
        return 0 if self.buffer is None else self.buffer.untyped_storage().nbytes()


def _chunk(length: int) -> int:
    chunk = max(_CHUNK, length // GROWTH_SHARE)
    return -(-length // chunk) * chunk
