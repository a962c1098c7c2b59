"""A14: every advertised pair of bit widths meets the half-step bound; everything else is refused at construction."""

import itertools

import pytest
import torch
from harness import assert_close, quant_cache, random_states, settings
from tiny_models import tiny_model

BITS = (2, 3, 4, 8, 16)
GROUP = 32


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=1, head_dim=32)


def bare(key_bits, value_bits, group=GROUP, key=None, value=None):
    """Nothing is kept exact, nothing is rotated: what is read back is what the codes say."""
    return settings(
        key_bits, value_bits, group=group, residual=0, sinks=0, key={"rope": "post", **(key or {})}, value=value
    )


def grouped(tensor, granularity, group):
    """`[B, H, T, D]` with the elements of each group on the last axis."""
    if granularity == "per_channel":
        tensor = tensor.transpose(2, 3)
    return tensor.unflatten(-1, (-1, group))


def step_ratio(true, read, nbits, granularity, group=GROUP):
    """Largest error over half a quantization step, over all groups."""
    true, read = grouped(true, granularity, group), grouped(read, granularity, group)
    half = (true.amax(-1) - true.amin(-1)) / (2**nbits - 1) / 2
    return ((true - read).abs().amax(-1) / half).max().item()


@pytest.mark.parametrize(("key_bits", "value_bits"), list(itertools.product(BITS, BITS)))
def test_a14_error_is_at_most_half_a_step(model, key_bits, value_bits):
    keys, values = random_states(1, 2, 64, 32)
    cache = quant_cache(model, bare(key_bits, value_bits))
    cache.update(keys, values, 0)
    if min(key_bits, value_bits) < 16:
        assert cache.quantized_length(0) == 64
    for true, read, nbits, granularity in zip(
        (keys, values), cache.dequantize(0), (key_bits, value_bits), ("per_channel", "per_token"), strict=True
    ):
        if nbits == 16:
            assert_close(read, true, 1e-6, granularity)
            continue
        ratio = step_ratio(true, read, nbits, granularity)
        assert 0.5 < ratio <= 1.05, f"{granularity} {nbits}-bit: {ratio} half steps"


@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_a14_both_granularities_for_both_tensors(granularity, group, nbits):
    model = tiny_model("llama", num_hidden_layers=1, head_dim=128)
    keys, values = random_states(2, 2, 256, 128)
    spec = {"granularity": granularity}
    cache = quant_cache(model, bare(nbits, nbits, group, spec, spec))
    cache.update(keys, values, 0)
    assert cache.quantized_length(0) == 256
    for true, read in zip((keys, values), cache.dequantize(0), strict=True):
        assert 0.5 < step_ratio(true, read, nbits, granularity, group) <= 1.05


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_a14_every_code_round_trips(nbits):
    """Groups that use each code, in shuffled order, with a range that makes scale and zero point exact."""
    model = tiny_model("llama", num_hidden_layers=1, head_dim=128)
    top, group = 2**nbits - 1, 128
    generator = torch.Generator().manual_seed(nbits)
    codes = torch.stack([torch.randperm(top + 1, generator=generator) for _ in range(4096 // (top + 1) * 16)])
    codes = codes.reshape(1, 4, 128, 128).float()
    for granularity in ("per_channel", "per_token"):
        data = codes if granularity == "per_token" else codes.transpose(2, 3)
        data = data.clone()
        # Every group spans the whole range, so that its scale is exactly one step.
        grouped_view = data if granularity == "per_token" else data.transpose(2, 3)
        grouped_view[..., 0], grouped_view[..., 1] = 0.0, float(top)
        assert data.unique().numel() == top + 1
        for scale, shift in ((1.0, 0.0), (0.5, -3.0), (0.25, 17.0)):
            states = data * scale + shift
            spec = {"granularity": granularity}
            cache = quant_cache(model, bare(nbits, nbits, group, spec, spec))
            cache.update(states.clone(), states.clone(), 0)
            assert cache.quantized_length(0) == 128
            for read in cache.dequantize(0):
                assert_close(read, states, 1e-4, f"{granularity} x {scale} + {shift}")


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a14_constant_groups_round_trip(model, nbits, clip, symmetric):
    """Constants that 16-bit metadata can hold come back exactly; zero always does."""
    keys = torch.full((1, 2, 64, 32), -2.5)
    values = torch.zeros(1, 2, 64, 32)
    values[:, 1] = 0.375
    spec = {"clip": clip, "symmetric": symmetric}
    cache = quant_cache(model, bare(nbits, nbits, key=spec, value=spec))
    cache.update(keys, values, 0)
    read_keys, read_values = cache.dequantize(0)
    tolerance = 2.5 * 2**-10 if symmetric else 0.0
    assert_close(read_keys, keys, tolerance, "keys")
    assert_close(read_values, values, tolerance, "values")
    assert (read_values[:, 0] == 0).all()


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_a14_symmetric_bound(model, nbits):
    """Symmetric codes: at most half of the step that covers the largest magnitude (one code less on one side)."""
    keys, values = random_states(1, 2, 64, 32)
    spec = {"symmetric": True}
    cache = quant_cache(model, bare(nbits, nbits, key=spec, value=spec))
    cache.update(keys, values, 0)
    for true, read, granularity in zip((keys, values), cache.dequantize(0), ("per_channel", "per_token"), strict=True):
        true, read = grouped(true, granularity, GROUP), grouped(read, granularity, GROUP)
        step = true.abs().amax(-1) / (2 ** (nbits - 1) - 1)
        assert ((true - read).abs().amax(-1) / step).max() <= 0.55
    assert cache.memory_report().zero_points == 0


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_a14_mse_clipping_lowers_the_error(nbits):
    model = tiny_model("llama", num_hidden_layers=1, head_dim=128)
    keys, values = random_states(1, 2, 256, 128)
    errors = {}
    for clip in ("minmax", "mse"):
        spec = {"clip": clip}
        cache = quant_cache(model, bare(nbits, nbits, 128, spec, spec))
        cache.update(keys.clone(), values.clone(), 0)
        errors[clip] = [
            (read - true).square().mean().item()
            for true, read in zip((keys, values), cache.dequantize(0), strict=True)
        ]
    for by_mse, by_range in zip(errors["mse"], errors["minmax"], strict=True):
        assert by_mse < 0.95 * by_range


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e5, 1e8, 1e38, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a14_any_finite_input_reads_back_finite(model, magnitude, dtype, clip, symmetric):
    keys, values = random_states(1, 2, 64, 32)
    peak = max(keys.abs().max().item(), values.abs().max().item())
    keys, values = ((part / peak * magnitude).to(dtype) for part in (keys, values))
    spec = {"clip": clip, "symmetric": symmetric}
    cache = quant_cache(model, bare(4, 4, key=spec, value=spec))
    cache.update(keys.clone(), values.clone(), 0)
    for true, read in zip((keys, values), cache.dequantize(0), strict=True):
        assert read.dtype == dtype
        assert torch.isfinite(read).all()
        error = (true.double() - read.double()).abs().max() / magnitude
        if 1e-6 <= magnitude <= 1e38:
            assert error <= 0.25, f"relative error {error}"
        else:
            assert error <= 1.01, f"relative error {error}"


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("nbits", [0, 1, 5, 6, 7, 9, 32, -4, True, 4.0, "4", None])
def test_a14_other_widths_are_refused(model, side, nbits):
    with pytest.raises(ValueError) as caught:
        quant_cache(model, settings(**{side: {"nbits": nbits}}))
    text = str(caught.value)
    assert "nbits" in text and repr(nbits) in text
    for allowed in BITS:
        assert str(allowed) in text


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(
    ("name", "received", "allowed"),
    [
        ("group_size", 0, "16"),
        ("group_size", -32, "16"),
        ("group_size", 48, "64"),
        ("group_size", 256, "128"),
        ("group_size", 32.0, "32"),
        ("granularity", "per_chanel", "per_channel"),
        ("rope", "before", "pre"),
        ("rotation", "hadamar", "hadamard"),
        ("clip", "max", "minmax"),
        ("method", "affin", "affine"),
        ("symmetric", "yes", "True"),
    ],
)
def test_a14_impossible_settings_name_argument_allowed_and_received(model, side, name, received, allowed):
    with pytest.raises(ValueError) as caught:
        quant_cache(model, settings(**{side: {name: received}}))
    text = str(caught.value)
    assert name in text and repr(received) in text and allowed in text


@pytest.mark.parametrize("name", ["residual_length", "sink_length"])
@pytest.mark.parametrize("received", [-1, 1.5, "16", None, True])
def test_a14_lengths_must_be_counts(model, name, received):
    with pytest.raises(ValueError) as caught:
        quant_cache(model, {**settings(), name: received})
    assert name in str(caught.value) and repr(received) in str(caught.value)


@pytest.mark.parametrize(
    ("quant", "nearest"),
    [
        ({"key": {"nbit": 4}}, "nbits"),
        ({"keys": {"nbits": 4}}, "key"),
        ({"residual_lenght": 4}, "residual_length"),
        ({"value": {"groupsize": 16}}, "group_size"),
        ("k4v44", "k4v4"),
    ],
)
def test_a14_a_typo_names_the_nearest_known_word(model, quant, nearest):
    with pytest.raises(ValueError, match=rf"\b{nearest}\b"):
        quant_cache(model, quant)


@pytest.mark.parametrize("override", [{"residual_lenght": 4}, {"nbits": 4}, {"bits": 4}])
def test_a14_unknown_overrides_are_refused(model, override):
    with pytest.raises((ValueError, TypeError), match=next(iter(override))):
        quant_cache(model, "k4v4", **override)
