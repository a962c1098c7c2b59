"""Stores of blocks whose every byte is accounted for."""

import pytest
import torch

from kvquant_hf.spec import QuantSpec
from kvquant_hf.storage import BlockStore


def counted_store(spec: QuantSpec, length: int, head_dim: int) -> tuple[BlockStore, torch.Tensor]:
    """A store of four blocks that holds as many bytes as its parts and its settings say, and a fifth block.

    Args:
        spec: How the blocks are stored.
        length: Tokens of a block.
        head_dim: Size of a key or value.

    Returns:
        The store, and a block `[2, 3, 1, length, head_dim]` that is not in it.
    """
    blocks = torch.randn(2, 3, 5, length, head_dim, generator=torch.Generator().manual_seed(0))
    store = BlockStore(spec, length, head_dim, torch.float32)
    for part in blocks[:, :, :4].split(2, dim=2):
        store.append(store.encode(part))
    parts = store.bytes_by_part()
    assert sum(parts.values()) == sum(tensor.untyped_storage().nbytes() for tensor in store.tensors())
    assert (parts["zero_points"] == 0) == spec.symmetric
    bits = 8 * (parts["codes"] + parts["scales"] + parts["zero_points"]) / blocks[:, :, :4].numel()
    assert bits == pytest.approx(spec.bits_per_value(head_dim, length), rel=1e-12)
    return store, blocks[:, :, 4:]
