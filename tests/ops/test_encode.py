"""Compiled quantizing and packing against the quantizer and the layout in PyTorch."""

import itertools
from dataclasses import replace

import pytest
import torch

from kvquant_hf import KVQuantConfig, ops
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec
from kvquant_hf.storage import BlockStore

L = 32


def states_like(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Strided states with outlier channels, a constant group and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    batch_size, heads, tokens, head_dim = shape
    states = torch.randn(batch_size, tokens, heads, head_dim, generator=generator)
    states[..., 3] += 30
    states[:, :32, 0, 5] = 1.25
    states[:, :, -1, 7] = 0
    states[:, 3, :, :16] *= 100
    return states.to(dtype).transpose(1, 2)


def expected(spec: QuantSpec, states: torch.Tensor, length: int, rotation=None, slot: int = 0, fitted=None):
    batch_size, heads, _, head_dim = states.shape
    blocks = states.reshape(batch_size, heads, -1, length, head_dim).float()
    if rotation is not None:
        cos, sin = rotation.block_tables(slot, blocks.shape[2], length, blocks.device)
        blocks = rotation.apply(blocks, cos, sin, inverse=True)
    return BlockStore(spec, length, head_dim, states.dtype).encode(blocks, fitted)


def assert_same(got, want) -> None:
    assert got is not None
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scale, want.scale)
    assert (got.zero_point is None) == (want.zero_point is None)
    if want.zero_point is not None:
        assert torch.equal(got.zero_point, want.zero_point)
    assert (got.second_level is None) == (want.second_level is None)
    if want.second_level is not None:
        assert got.second_level.dtype == want.second_level.dtype
        assert torch.equal(got.second_level, want.second_level)


SPECS = [
    QuantSpec(nbits, granularity, group_size=group_size, rope="post", symmetric=symmetric)
    for nbits, granularity, group_size, symmetric in itertools.product(
        (2, 3, 4, 8), ("per_channel", "per_token"), (16, 32, 64, 128), (False, True)
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_format_is_that_of_the_quantizer_bit_for_bit(spec):
    length = spec.group_size if spec.granularity == "per_channel" else 32
    for head_dim in (16, 64, 80, 96, 256):
        states = states_like(2, 3, 2 * length, head_dim)
        assert_same(cpu.encode(spec, states, length), expected(spec, states, length))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_scales_of_8_bits_are_those_of_the_quantizer_bit_for_bit(nbits, group_size, rotation):
    spec = QuantSpec(nbits, "per_token", group_size, rope="post", rotation=rotation, symmetric=True, metadata_nbits=8)
    for head_dim in (16, 64, 128):
        states = states_like(2, 3, 4 * L, head_dim)
        assert_same(cpu.encode(spec, states, L), expected(spec, states, L))
    fitted = states_like(2, 3, 4 * L, 64, seed=1).reshape(2, 3, 4, L, 64).contiguous()
    states = states_like(2, 3, 4 * L, 64)
    assert_same(cpu.encode(spec, states, L, fitted=fitted), expected(spec, states, L, fitted=fitted))


@pytest.mark.parametrize("octaves", [2, 7, 9, 40])
def test_scales_of_8_bits_over_many_octaves(octaves):
    spec = QuantSpec(4, "per_token", rope="post", symmetric=True, metadata_nbits=8)
    states = torch.randn(1, 2, 2 * L, 64, generator=torch.Generator().manual_seed(0))
    states *= 2.0 ** (12 - torch.linspace(0, octaves, 2 * L))[:, None]
    states[:, 1, :L] = 0
    got, want = cpu.encode(spec, states, L), expected(spec, states, L)
    assert_same(got, want)
    assert bool((want.second_level < 0).any()) == (octaves > 15)  # two blocks share the octaves


@pytest.mark.parametrize("power", [2.0**-30, 2.0**17])
def test_scales_of_8_bits_that_float16_cannot_hold_are_left_to_the_quantizer(power):
    spec = QuantSpec(4, "per_token", rope="post", symmetric=True, metadata_nbits=8)
    states = states_like(1, 2, 2 * L, 64) / 3000
    assert cpu.encode(spec, states, L) is not None
    assert cpu.encode(spec, states * power, L) is None


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_scales_of_8_bits_of_least_squared_error(nbits):
    spec = QuantSpec(nbits, "per_token", symmetric=True, clip="mse", metadata_nbits=8)
    states = states_like(2, 3, 4 * L, 64)
    got, want = cpu.encode(spec, states, L), expected(spec, states, L)
    assert torch.equal(got.second_level, want.second_level)
    assert (got.scale == want.scale).float().mean() > 0.99
    assert not torch.equal(got.scale, cpu.encode(replace(spec, clip="minmax"), states, L).scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("offset", "width"), [(0, 64), (0, 32), (16, 24), (0, 2)])
def test_the_rotary_embedding_is_undone_bit_for_bit(dtype, pairing, offset, width):
    rotation = KeyRotation(1 / 1e4 ** (torch.arange(width // 2) / (width // 2)), 64, offset, pairing)
    spec = QuantSpec(4, "per_channel", rope="pre")
    states = states_like(2, 2, 4 * L, 64, dtype=dtype)
    for first_block in (0, 3, 70):
        got = cpu.encode(spec, states, L, rotation, num_sinks=4, first_block=first_block)
        assert_same(got, expected(spec, states, L, rotation, 4 + first_block * L))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
def test_the_hadamard_rotation_is_applied_bit_for_bit(head_dim):
    for granularity in ("per_channel", "per_token"):
        spec = QuantSpec(3, granularity, rope="post", rotation="hadamard")
        states = states_like(1, 2, 2 * L, head_dim)
        assert_same(cpu.encode(spec, states, L), expected(spec, states, L))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
def test_ranges_may_be_fitted_to_other_states(granularity, rotation):
    spec = QuantSpec(4, granularity, rope="post", rotation=rotation)
    states = states_like(2, 2, 3 * L, 64)
    fitted = states_like(2, 2, 3 * L, 64, seed=1).reshape(2, 2, 3, L, 64).contiguous()
    got = cpu.encode(spec, states, L, fitted=fitted)
    assert_same(got, expected(spec, states, L, fitted=fitted))
    assert not torch.equal(got.codes, cpu.encode(spec, states, L).codes)


@pytest.mark.parametrize("nbits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_least_squared_error_is_found(nbits, symmetric):
    spec = QuantSpec(nbits, "per_token", symmetric=symmetric, clip="mse")
    states = states_like(2, 3, 4 * L, 64)
    got, want = cpu.encode(spec, states, L), expected(spec, states, L)
    blocks = states.reshape(2, 3, 4, L, 64)
    errors = []
    for packed in (got, want):
        store = BlockStore(spec, L, 64, states.dtype)
        store.append(packed)
        errors.append((store.read(0, 4) - blocks).square().unflatten(-1, (2, 32)).sum(-1))
    assert (errors[0] <= errors[1] * 1.0001 + 1e-6).all()
    assert (got.scale == want.scale).float().mean() > 0.99
    plain = cpu.encode(QuantSpec(nbits, "per_token", symmetric=symmetric), states, L)
    assert not torch.equal(got.scale, plain.scale)


@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
def test_other_methods_are_left_to_their_quantizers(granularity):
    spec = QuantSpec(4, granularity, rope="post", method="variance_normalized")
    assert not cpu.can_encode(spec, torch.float32, torch.device("cpu"), L, 64)
    assert ops.encode_blocks(BlockStore(spec, L, 64, torch.float32), states_like(1, 1, L, 64), 0, 0) is None
    plain = replace(spec, method="affine")
    assert ops.encode_blocks(BlockStore(plain, L, 64, torch.float32), states_like(1, 1, L, 64), 0, 0) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5, -1e5])
@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
def test_what_float16_cannot_hold_is_left_to_the_quantizer(value, granularity):
    spec = QuantSpec(4, granularity, rope="post")
    states = states_like(2, 2, 2 * L, 64)
    states[1, 1, 40, 50] = value
    assert cpu.encode(spec, states, L) is None


def test_spreads_below_float16_are_left_to_the_quantizer():
    spec = QuantSpec(8, "per_channel", rope="post")
    states = 1 + 1e-6 * torch.rand(1, 1, L, 16)
    assert cpu.encode(spec, states, L) is not None  # rounding of the offset dwarfs the spread either way
    assert cpu.encode(spec, 1e-5 * torch.randn(1, 1, L, 16), L) is None


def test_threads_change_nothing():
    spec, states = QuantSpec(2, "per_token", clip="mse", rotation="hadamard"), states_like(2, 3, 40 * L, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu.encode(spec, states, L)
        torch.set_num_threads(2)
        assert_same(cpu.encode(spec, states, L), alone)
    finally:
        torch.set_num_threads(before)


def test_a_block_does_not_depend_on_its_neighbours():
    spec = QuantSpec(2, "per_token", clip="mse", rotation="hadamard")
    states = states_like(1, 2, 6 * L, 64)
    whole = cpu.encode(spec, states, L)
    parts = [cpu.encode(spec, states[:, :, i * L : (i + 1) * L], L) for i in range(6)]
    for name in ("codes", "scale", "zero_point"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts], dim=2))


def test_the_torch_backend_compiles_nothing(monkeypatch):
    """Neither for quantizing nor for appending single tokens."""

    def refused(*args):
        raise AssertionError("compiled code was asked for")

    monkeypatch.setattr(ops, "appender", refused)
    monkeypatch.setattr(ops, "encode_blocks", refused)
    layer = QuantLayer(KVQuantConfig(backend="torch", residual_length=0))
    layer.update(*torch.randn(2, 1, 2, 80, 32))
    for states in torch.randn(40, 2, 1, 2, 1, 32):
        layer.update(*states)
    assert layer.get_seq_length() == 120 and layer.quantized_length == 96
