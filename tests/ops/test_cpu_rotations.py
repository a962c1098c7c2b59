"""Rotations that attention cannot take over, read by the compiled CPU backend: before RoPE, and across heads."""

import pytest
import torch

from kvquant_hf.ops import cpu, reference
from kvquant_hf.ops.cpu import build
from kvquant_hf.rotation import head_group
from tests.ops.test_cpu_formats import check_read, rotary
from tests.ops.test_decode_attention import filled_layer, mask_of, poison_fresh_memory  # noqa: F401

# Sides of `rotatekv2`.
KEYS = {"nbits": 2, "granularity": "per_token", "group_size": 128, "rotation": "grouped_heads"}
VALUES = {"nbits": 2, "granularity": "per_token", "group_size": 128, "rotation": "hadamard"}
CHANNELS = {"granularity": "per_channel", "rotation": "grouped_heads"}
TOKENS = {"granularity": "per_token", "rotation": "grouped_heads"}


def check_all(layer, kv_heads):
    """Three query rows to a head, as neighbours in a group and as tokens."""
    tokens = layer.get_seq_length()
    check_read(layer, 3 * kv_heads, 1)
    check_read(layer, kv_heads, 3, torch.rand(2, 1, 3, tokens) > 0.3)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "rope", "dtype"),
    [
        (1, 64, "half", torch.float32),
        (2, 80, "interleaved", torch.bfloat16),
        (3, 96, "partial", torch.float32),
        (4, 64, "half", torch.bfloat16),
        (4, 128, "half", torch.float32),
        (6, 96, "half", torch.float32),
        (8, 80, "partial", torch.float32),
        (8, 64, "interleaved", torch.float16),
        (12, 48, "none", torch.float32),
    ],
    ids=str,
)
def test_rotatekv(kv_heads, head_dim, rope, dtype):
    """Groups of 4, 2 and 1 heads, Hadamard matrices of 128, 64, 32 and 16 channels."""
    shape = {"kv_heads": kv_heads, "head_dim": head_dim, "rotation": rotary(head_dim, rope), "dtype": dtype}
    mixes_values = kv_heads in (1, 6)
    shape |= {"key": KEYS, "value": VALUES | ({"rotation": "grouped_heads"} if mixes_values else {})}
    layer = filled_layer(309, uneven=True, **shape)
    check_all(layer, kv_heads)
    defines = dict(layer.view().memo["cpu"].defines)
    assert (defines["KG"], defines["VG"]) == (head_group(kv_heads), head_group(kv_heads) if mixes_values else 1)
    padded = filled_layer(140, batch_size=3, padding=[37, 2, 0], **shape)
    check_read(padded, 3 * kv_heads, 1, mask_of([37, 2, 0], 140))


# Orders of the channels of keys and of values.
ORDER48, ORDER64 = ({"channel_order": [7 * place % size for place in range(size)]} for size in (48, 64))
PAIRS = {
    "per-channel": (CHANNELS, TOKENS | {"group_size": 16}),
    "per-channel-short-groups": (CHANNELS | {"nbits": 3, "group_size": 16}, CHANNELS | {"nbits": 3}),
    "promoted": (CHANNELS | {"nbits": 2, "promoted": 0.25}, {"nbits": 16}),
    "outliers": (CHANNELS | {"outliers": 0.02, "group_size": 64}, CHANNELS | {"outliers": 0.02, "symmetric": True}),
    "outliers-across": (TOKENS | {"outliers": 0.02}, TOKENS | {"outliers": 0.02, "nbits": 8}),
    "factors": (CHANNELS | {"method": "variance_normalized"}, TOKENS | {"method": "variance_normalized", "nbits": 2}),
    "factors-across": (TOKENS | {"method": "innerq"}, CHANNELS | {"method": "innerq"}),
    "tables": (TOKENS | {"levels": "gaussian", "symmetric": True}, TOKENS | {"levels": "e4m3", "nbits": 8}),
    "bytes": (
        TOKENS | {"levels": "e2m1", "symmetric": True, "metadata_nbits": 8, "group_size": 16},
        TOKENS | {"symmetric": True, "metadata_nbits": 8},
    ),
    "bytes-per-channel": (CHANNELS | {"symmetric": True, "metadata_nbits": 8}, {"rotation": "hadamard_signs"}),
    "signs": (CHANNELS | {"rotation": "hadamard_signs"}, CHANNELS | {"rotation": "hadamard_signs"}),
    "signs-across": (TOKENS | {"rotation": "hadamard_signs", "group_size": 16}, TOKENS | {"nbits": 3}),
    "hadamard": (CHANNELS | {"rotation": "hadamard", "nbits": 8}, TOKENS | {"nbits": 8, "group_size": 64}),
    "hadamard-across": (TOKENS | {"rotation": "hadamard", "symmetric": True}, {"nbits": 16}),
    "orders": (CHANNELS | ORDER48, CHANNELS | ORDER64 | {"rotation": "hadamard", "nbits": 3}),
    "orders-across": (TOKENS | ORDER48 | {"rotation": "hadamard", "outliers": 0.02}, TOKENS | ORDER64),
    "orders-signs": (
        TOKENS | ORDER48 | {"rotation": "hadamard_signs"},
        TOKENS | ORDER64 | {"rotation": "hadamard_signs"},
    ),
    "exact-keys": ({"nbits": 16}, TOKENS),
}


def layer_of(name, tokens, **more):
    """Two groups of four heads; 32 does not divide the rows of their keys."""
    shape = {"kv_heads": 8, "head_dim": 48, "value_dim": 64, "rotation": rotary(48), "uneven": True}
    key, value = PAIRS[name]
    return filled_layer(tokens, key=key, value=value, **shape, **more)


@pytest.mark.parametrize("name", PAIRS)
def test_whatever_is_stored(name):
    check_all(layer_of(name, 309), 8)
    padded = layer_of(name, 170, batch_size=3, padding=[37, 2, 0])
    check_read(padded, 24, 1, mask_of([37, 2, 0], 170))


@pytest.mark.parametrize("key", [CHANNELS, TOKENS, TOKENS | {"rotation": "hadamard_signs"}], ids=str)
def test_keys_that_no_position_turns(key):
    layer = filled_layer(309, kv_heads=4, uneven=True, key=key | {"rope": "post"}, value=CHANNELS)
    check_all(layer, 4)


@pytest.mark.parametrize("name", ["per-channel", "outliers", "outliers-across", "hadamard"])
def test_parameters_in_float32(name):
    layer = layer_of(name, 100)
    big = 1e5 * torch.randn(2, 8, 64, 64)
    layer.update(big[..., :48], big)
    assert layer._stores[0].scale.dtype == layer._stores[1].scale.dtype == torch.float32
    view, query = layer.view(1), 1e-5 * torch.randn(2, 24, 1, 48)
    assert cpu.unsupported(view) is None
    torch.testing.assert_close(
        cpu.decode_attention(query, view, None, 0.2),
        reference.decode_attention(query, view, None, 0.2),
        rtol=1e-4,
        atol=2e-6 * big.abs().max().item(),
    )


def test_splits_of_mixed_heads():
    layer, before = layer_of("per-channel", 3000, batch_size=1), torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        check_read(layer, 24, 1)
        is_split = any(call.scratch for call in layer.view().memo["cpu"].calls.values())
        assert is_split or not build.parallel_region()
    finally:
        torch.set_num_threads(before)
