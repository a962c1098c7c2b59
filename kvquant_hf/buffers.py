"""Buffers that grow on their third axis without copying what they hold at every step."""

from collections.abc import Callable
from typing import Any

import torch

TensorMap = Callable[[torch.Tensor], torch.Tensor]

# Buffers grow by a fixed number of tokens or blocks, or by a sixteenth of what they hold once that is more.
GROWTH_SHARE = 16


def with_capacity(buffer: torch.Tensor | None, like: torch.Tensor, used: int, needed: int, room: int) -> torch.Tensor:
    """A buffer with place for `needed` entries on axis 2 that holds the first `used` of `buffer`."""
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    shape = (*like.shape[:2], needed + room, *like.shape[3:])
    grown = torch.empty(shape, dtype=like.dtype, device=like.device)
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown


def storage_bytes(value: Any) -> int:
    """Bytes of the storage behind a tensor, which may be larger than the tensor; 0 for anything else."""
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0
