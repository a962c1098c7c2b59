"""InnerQ: levels, the better of two kinds, factors of channels, and its place in stores, files and caches."""

import pytest
import torch
from harness import assert_reported_bytes, forward, quant_cache, random_ids, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf.ops import cpu, triton
from kvquant_hf.quantizers import AffineQuantizer, InnerQuantizer
from kvquant_hf.quantizers.innerq import channel_factors
from kvquant_hf.storage import BlockStore
from tests.quantizers.cuts import assert_cuts_change_nothing

NBITS = (2, 3, 4, 8)
QUANT = settings(
    3,
    3,
    key={"granularity": "per_token", "method": "innerq", "symmetric": True, "rope": "post"},
    value={"granularity": "per_channel", "method": "innerq"},
)


def blocks_of(*lead: int, rows: int = 64, length: int = 80, seed: int = 0) -> torch.Tensor:
    """Rows whose elements differ in size by their column, `[..., rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, rows, length, generator=generator) * torch.randn(length, generator=generator).exp()


def round_trip(rows: torch.Tensor, *range_rows: torch.Tensor, **changes):
    quantizer = InnerQuantizer(QuantSpec(**({"granularity": "per_token", "method": "innerq"} | changes)))
    groups = quantizer.quantize(rows, *range_rows)
    return quantizer.dequantize(groups), groups


def peaks(rows: torch.Tensor, group_size: int) -> torch.Tensor:
    """Largest size of each group, at every element."""
    parts = [part.abs().amax(-1, keepdim=True).expand(part.shape) for part in rows.split(group_size, -1)]
    return torch.cat(parts, -1)


@pytest.mark.parametrize("group_size", [16, 32, 64])
@pytest.mark.parametrize("nbits", NBITS)
def test_symmetric_codes_are_a_sign_and_a_magnitude_within_half_a_step(nbits, group_size):
    rows, most = blocks_of(2, 3), 2 ** (nbits - 1) - 1
    values, groups = round_trip(rows, nbits=nbits, group_size=group_size, symmetric=True)
    assert groups.zero_point is None and groups.factor.shape == (2, 3, 80) and groups.factor.dtype == torch.float16
    assert groups.codes.max() == 2 * most and groups.codes.min() == 0
    factor = groups.factor.float()[..., None, :]
    step = groups.scale.float().repeat_interleave(group_size, -1)[..., :80]
    magnitude = values / factor / step
    torch.testing.assert_close(magnitude, magnitude.round(), rtol=0, atol=1e-4)
    assert (values == 0).any() and magnitude.abs().max().round() == most
    bound = peaks(rows / factor, group_size) / most / 2 * factor
    assert ((values - rows).abs() <= 1.01 * bound + 1e-6).all()
    assert torch.equal(round_trip(-rows, nbits=nbits, group_size=group_size, symmetric=True)[0], -values)


def test_factors_are_square_roots_of_the_largest_sizes_in_a_block():
    rows = blocks_of(2, 3)
    factor = channel_factors(rows)
    torch.testing.assert_close(factor.float(), rows.abs().amax(-2).sqrt(), rtol=2**-11, atol=0)
    rows[0, 0, :, 5] = 0
    assert channel_factors(rows)[0, 0, 5] == 1
    for granularity, present in (("per_token", True), ("per_channel", False)):
        spec = QuantSpec(3, granularity, method="innerq")
        assert (InnerQuantizer(spec).quantize(rows).factor is not None) == spec.has_factor == present


@pytest.mark.parametrize("nbits", (2, 3))
def test_normalizing_pays_where_channels_differ_in_size(nbits):
    rows = blocks_of(4)
    size = rows.std(-2, keepdim=True)
    lost = [
        ((values - rows) / size).square().mean()
        for values in (
            round_trip(rows, nbits=nbits, symmetric=True)[0],
            round_trip(rows, nbits=nbits, symmetric=True, granularity="per_channel")[0],  # the same groups, no factor
        )
    ]
    assert lost[0] < (0.9 if nbits == 2 else 0.6) * lost[1]


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("nbits", NBITS)
def test_hybrid_groups_are_the_better_of_two_kinds(nbits, clip):
    rows = blocks_of(2, 3, rows=32, length=64)
    rows[:, :, ::2] += 2 * peaks(rows[:, :, ::2], 32)  # far from zero
    changes = {"nbits": nbits, "granularity": "per_channel", "clip": clip}
    values, groups = round_trip(rows, **changes)
    even, _ = round_trip(rows, symmetric=True, **changes)
    affine = AffineQuantizer(QuantSpec(**changes))
    shifted = affine.dequantize(affine.quantize(rows))
    errors = [
        torch.stack([part.sum(-1) for part in (t - rows).abs().split(32, -1)], -1) for t in (values, even, shifted)
    ]
    torch.testing.assert_close(errors[0], torch.minimum(errors[1], errors[2]))
    assert (groups.scale[:, :, ::2] < 0).float().mean() > 0.9 and (nbits == 8 or (groups.scale > 0).any())
    of_group = groups.scale.signbit().repeat_interleave(32, -1)
    assert torch.equal(values, torch.where(of_group, shifted, even))
    assert (groups.zero_point[~groups.scale.signbit()] == 0).all()


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 6e-4, -1e4])
def test_constant_groups_of_a_half_type_are_exact_if_hybrid_and_rounded_once_if_symmetric(nbits, value):
    rows = torch.full((3, 32, 40), value).half().float()
    values, _ = round_trip(rows, nbits=nbits, granularity="per_channel")
    assert torch.equal(values, rows)
    even, _ = round_trip(rows, nbits=nbits, granularity="per_channel", symmetric=True)
    torch.testing.assert_close(even, rows, rtol=2**-10, atol=2.0**-24 * (2 ** (nbits - 1) - 1))
    normalized, groups = round_trip(rows, nbits=nbits)
    torch.testing.assert_close(normalized, rows, rtol=2**-10, atol=1e-6)
    assert groups.factor.unique().numel() == 1


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    exponent=st.integers(-38, 38),
    spread=st.floats(0, 8),
    offset=st.floats(-(2.0**126), 2.0**126, width=32),
    nbits=st.sampled_from(NBITS),
    symmetric=st.booleans(),
    granularity=st.sampled_from(["per_token", "per_channel"]),
    seed=st.integers(0, 2**16),
)
def test_any_finite_input_gives_finite_parameters_and_values(
    exponent, spread, offset, nbits, symmetric, granularity, seed
):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 24, 40, generator=generator) * (spread * torch.randn(1, 1, 40, generator=generator)).exp()
    rows = (noise.double() * 10.0**exponent + offset).clamp(-3.4e38, 3.4e38).float()
    values, groups = round_trip(rows, nbits=nbits, symmetric=symmetric, granularity=granularity)
    for part in (groups.scale, groups.zero_point, groups.factor, values):
        assert part is None or torch.isfinite(part).all()
    assert groups.factor is None or (groups.factor > 0).all()


@pytest.mark.parametrize("name", ["zeros", "one-entry", "zero-columns", "huge-column", "undefined-column"])
def test_degenerate_blocks_lose_nothing_of_the_other_columns(name):
    rows = blocks_of(1, length=64)
    if name == "zeros":
        rows.zero_()
    elif name == "one-entry":
        rows.zero_()[0, 3, 5] = 1e20
    elif name == "zero-columns":
        rows[..., ::2] = 0
    elif name == "huge-column":
        rows[..., 3] *= 1e12
    else:
        rows[..., 3] = float("nan")
    values, groups = round_trip(rows, nbits=8, symmetric=True)
    assert torch.isfinite(groups.factor).all()
    other = slice(32, 64)  # another group of each token
    bound = peaks(rows[..., other] / groups.factor[..., None, other].float(), 32) / 127 / 2
    assert ((values - rows)[..., other].abs() <= 1.01 * bound * groups.factor[..., None, other].float() + 1e-6).all()
    if name in ("zeros", "one-entry", "zero-columns"):
        assert (values[rows == 0] == 0).all()
    if name == "one-entry":
        assert values[0, 3, 5] == pytest.approx(1e20, rel=1e-2)


def test_factors_and_ranges_are_fitted_to_other_rows_where_some_are_given():
    clean = blocks_of(2)
    rows = clean.clone()
    rows[:, :7] = 1000.0  # pads
    for symmetric in (False, True):
        _, fitted = round_trip(rows, clean, nbits=3, symmetric=symmetric)
        _, plain = round_trip(clean, nbits=3, symmetric=symmetric)
        for name in ("factor", "scale", "zero_point"):
            assert getattr(plain, name) is None or torch.equal(getattr(fitted, name), getattr(plain, name))
        assert torch.equal(fitted.codes[:, 7:], plain.codes[:, 7:])


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_block_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(symmetric):
    blocks = blocks_of(2, 3, 5)
    changes = {"nbits": 3, "symmetric": symmetric}
    _, whole = round_trip(blocks, **changes)
    scattered = torch.empty(80, 5, 2, 64, 3).permute(2, 4, 1, 3, 0).copy_(blocks)
    _, other = round_trip(scattered, **changes)
    parts = [round_trip(blocks[:, :, i : i + 1], **changes)[1] for i in range(5)]
    for name in ("codes", "scale", "zero_point", "factor"):
        tensor = getattr(whole, name)
        if tensor is not None:
            assert torch.equal(tensor, getattr(other, name))
            assert torch.equal(tensor, torch.cat([getattr(part, name) for part in parts], 2))


def test_rounding_by_queries_keeps_the_parameters_and_lowers_what_queries_see():
    rows = blocks_of(1, 2, 3, rows=16, length=32).transpose(-1, -2).contiguous()
    root = torch.randn(2, 32, 6, generator=torch.Generator().manual_seed(1))
    moment = root @ root.transpose(-1, -2) + 0.05 * torch.eye(32)
    lower = torch.linalg.cholesky(moment)
    feedback = (lower / lower.diagonal(dim1=-2, dim2=-1)[:, None, :]).tril(-1)
    quantizer = InnerQuantizer(QuantSpec(3, "per_channel", 16, method="innerq"))
    seen = []
    for used in (None, feedback):
        groups = quantizer.quantize(rows, None, used)
        error = quantizer.dequantize(groups) - rows
        seen.append((error.transpose(-1, -2) @ moment[:, None] * error.transpose(-1, -2)).sum())
    assert torch.equal(groups.scale, quantizer.quantize(rows).scale)
    assert seen[1] < 0.8 * seen[0]


# ---- stores, settings, caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("granularity", ["per_token", "per_channel"])
def test_stores_give_back_what_the_quantizer_made_and_count_every_byte(granularity, symmetric):
    spec = QuantSpec(3, granularity, 32, method="innerq", symmetric=symmetric)
    blocks = blocks_of(2, 3, 5, rows=128)
    store = BlockStore(spec, 128, 80, torch.float32)
    for part in blocks.split(2, dim=2):
        store.append(store.encode(part))
    rows = blocks.transpose(-1, -2) if granularity == "per_channel" else blocks
    values, _ = round_trip(rows, nbits=3, granularity=granularity, symmetric=symmetric)
    assert torch.equal(store.read(0, 5), values.transpose(-1, -2) if granularity == "per_channel" else values)
    held = sum(tensor.untyped_storage().nbytes() for tensor in store.tensors())
    parts = store.bytes_by_part()
    assert sum(parts.values()) == held
    assert 8 * (held - parts["unused"]) == pytest.approx(spec.bits_per_value(80, 128) * blocks.numel())
    again = BlockStore(spec, 128, 80, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 4), store.read(1, 4))


def test_blocks_are_long_enough_to_spread_the_factors():
    config = KVQuantConfig.from_preset("innerq3")
    assert config.block_length == 128
    assert config.key.metadata_bits(64, 128) == 16 / 32 + 16 / 128
    assert config.value.metadata_bits(64, 128) == 16 / 32
    assert config.nominal_bits(64) == 3.5625
    lengths = [QuantSpec(3, "per_token", size, method="innerq").token_group for size in (16, 32, 64, 128)]
    assert lengths == [64, 128, 128, 128]
    assert QuantSpec(3, "per_channel", 16, method="innerq").token_group == 16
    assert not QuantSpec(16, "per_token", method="innerq").has_factor


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("padding", [None, [67, 2]])
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(padding):
    config = KVQuantConfig.from_dict(QUANT).replace(key={"symmetric": False, "rope": "pre"})
    assert config.block_length == 64
    states = torch.randn(2, 2, 290, 2, 32).transpose(2, 3)
    layer = assert_cuts_change_nothing(config, states, [5, 100, 1, 184], padding)
    assert layer.quantized_length == 256


def test_caches_hold_what_they_report_and_come_back_from_files(model, tmp_path):
    cache = quant_cache(model, QUANT)
    forward(model, random_ids(2, 160), cache)
    assert_reported_bytes(cache)
    nominal = KVQuantConfig.from_dict(QUANT).nominal_bits(model.config.head_dim)
    assert cache.memory_report().bits_per_value_quantized == pytest.approx(nominal)
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    for token in random_ids(2, 70, seed=1).split(1, dim=1):
        assert torch.equal(forward(model, token, back), forward(model, token, cache))


@pytest.mark.parametrize(
    "sides", [QUANT, {"key": {"method": "innerq"}, "residual_length": 16}], ids=["inner", "outer"]
)
def test_it_is_read_by_the_kernels_and_stored_by_torch(model, sides):
    logits = {}
    for backend in ("auto", "cpu", "torch"):
        cache = quant_cache(model, sides, backend=backend)
        forward(model, random_ids(2, 120), cache)
        logits[backend] = forward(model, random_ids(2, 1, seed=1), cache)
    assert torch.equal(logits["auto"], logits["cpu"])
    torch.testing.assert_close(logits["auto"], logits["torch"], rtol=1e-4, atol=1e-5)
    assert triton.unsupported(cache.quantized_layer(0).view(1)) is None
    assert not cpu.can_encode(QuantSpec(method="innerq"), torch.float32, torch.device("cpu"), 32, 32)
