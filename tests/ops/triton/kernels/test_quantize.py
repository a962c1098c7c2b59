"""The quantize kernels against the torch quantizer on the CPU: the same bits."""

import pytest
import torch

from kvquant_hf.ops.triton import ChannelOrder, WordLayout, encode_blocks
from kvquant_hf.ops.triton import quantize as launching
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec
from kvquant_hf.storage import BlockStore
from tests.ops.triton.kernels.fences import Fences, fenced_empty


def stores(spec: QuantSpec, length: int, head_dim: int, rotation: KeyRotation | None, dtype: torch.dtype):
    order = ChannelOrder.of(rotation, head_dim) if spec.granularity == "per_channel" else ChannelOrder(head_dim)
    return (BlockStore(spec, length, head_dim, dtype, WordLayout(spec, length, order)) for _ in range(2))


def rope(width: int, head_dim: int, offset: int = 0, pairing: str = "half") -> KeyRotation:
    return KeyRotation(1 / 1000 ** (torch.arange(width // 2) / (width // 2)), head_dim, offset=offset, pairing=pairing)


def compare(spec, states, slot, rotation, length, device, monkeypatch):
    """Kernel and quantizer, from the same strided states `[B, H, n·L, D]`."""
    batch_size, heads, _, head_dim = states.shape
    mine, theirs = stores(spec, length, head_dim, rotation, states.dtype)
    fences = Fences()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fenced_empty(fences))
        got = encode_blocks(mine, fences.copy(states.to(device)), slot, rotation)
    fences.check()
    blocks = states.reshape(batch_size, heads, -1, length, head_dim).float()
    if rotation is not None:
        cos, sin = rotation.block_tables(slot, blocks.shape[2], length, blocks.device)
        blocks = rotation.apply(blocks, cos, sin, inverse=True)
    want = theirs.encode(blocks)
    assert got is not None and want.metadata is not None
    assert torch.equal(got.codes.cpu(), want.codes)
    assert got.metadata.dtype == want.metadata.dtype
    assert torch.equal(got.metadata.cpu().view(torch.uint8), want.metadata.contiguous().view(torch.uint8))


KEYS = [
    ("k4", 4, False, 64, 32, "whole", torch.bfloat16),
    ("k2", 2, False, 64, 32, "whole", torch.float16),
    ("k3", 3, False, 32, 32, "whole", torch.float32),
    ("k8", 8, False, 32, 64, "whole", torch.bfloat16),
    ("symmetric-k4", 4, True, 32, 32, "whole", torch.float32),
    ("symmetric-k3", 3, True, 16, 16, "whole", torch.float16),
    ("post-rope", 4, False, 128, 32, None, torch.bfloat16),
    ("interleaved-partial", 2, False, 64, 32, rope(24, 64, 8, "interleaved"), torch.float16),
    ("partial", 4, False, 64, 32, rope(16, 64), torch.bfloat16),
]


def keys_of(tokens, head_dim, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    states = torch.randn(2, tokens, 2, head_dim, generator=generator)
    states[..., 3] += 20  # an outlier channel
    states[:, :, 1, 5] = 0.75  # constant groups
    return states.to(dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("nbits", "symmetric", "head_dim", "length", "rotation", "dtype"),
    [case[1:] for case in KEYS],
    ids=[case[0] for case in KEYS],
)
def test_keys(nbits, symmetric, head_dim, length, rotation, dtype, device, monkeypatch):
    spec = QuantSpec(nbits=nbits, group_size=length, symmetric=symmetric)
    rotation = rope(head_dim, head_dim) if rotation == "whole" else rotation
    compare(spec, keys_of(2 * length, head_dim, dtype), 4 + 3 * length, rotation, length, device, monkeypatch)


VALUES = [
    ("v4", 4, False, 64, 32, "none", torch.bfloat16),
    ("v2-hadamard", 2, False, 64, 32, "hadamard", torch.float16),
    ("v3-hadamard-d128", 3, False, 128, 32, "hadamard", torch.bfloat16),
    ("v8-group-16", 8, False, 32, 16, "none", torch.float32),
    ("v4-group-128", 4, False, 64, 128, "none", torch.float16),
    ("v3-d16", 3, False, 16, 16, "none", torch.float16),
    ("symmetric-v4", 4, True, 64, 32, "none", torch.float32),
    ("symmetric-v2-hadamard", 2, True, 32, 16, "hadamard", torch.bfloat16),
]


@pytest.mark.parametrize(
    ("nbits", "symmetric", "head_dim", "group", "rotate", "dtype"),
    [case[1:] for case in VALUES],
    ids=[case[0] for case in VALUES],
)
def test_values(nbits, symmetric, head_dim, group, rotate, dtype, device, monkeypatch):
    spec = QuantSpec(
        nbits=nbits, granularity="per_token", group_size=group, symmetric=symmetric, rotation=rotate, rope="post"
    )
    compare(spec, keys_of(48, head_dim, dtype), 4, None, 16, device, monkeypatch)


@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
@pytest.mark.parametrize("magnitude", [1e5, 4e4, 1e-6])
def test_numbers_that_float16_does_not_serve_are_left_to_the_quantizer(granularity, magnitude, device):
    spec = QuantSpec(granularity=granularity, rope="post")
    store, _ = stores(spec, 32, 32, None, torch.float32)
    states = torch.rand(1, 1, 32, 32, device=device)
    assert encode_blocks(store, states, 0, None) is not None
    states[0, 0, 7] = magnitude if magnitude > 1 else states[0, 0, 7]
    states = states if magnitude > 1 else states * magnitude
    assert encode_blocks(store, states, 0, None) is None
    blocks = store.encode(states.reshape(1, 1, 1, 32, 32))
    assert blocks.metadata is None


def test_what_the_kernels_do_not_quantize(device):
    varn = {"method": "variance_normalized"}
    promoted = {"promoted": 0.25}
    for changes, head_dim in (
        ({"clip": "mse"}, 32),
        ({"rotation": "hadamard"}, 32),
        ({}, 48),
        (varn, 32),
        (promoted, 32),
        ({"granularity": "per_token", "symmetric": True, "metadata_nbits": 8}, 32),
        ({"granularity": "per_token", "rotation": "hadamard", "channel_order": tuple(range(31, -1, -1))}, 32),
    ):
        store, _ = stores(QuantSpec(**changes), 32, head_dim, None, torch.float32)
        assert not launching.quantizes(store)
        assert encode_blocks(store, torch.rand(1, 1, 32, head_dim, device=device), 0, None) is None
