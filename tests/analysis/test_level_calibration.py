"""Gradients against finite differences, samples in units of the real groups, levels from model to cache."""

import dataclasses
import math

import pytest
import torch
from tiny_models import tiny_model
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.analysis import calibrate_levels
from kvquant_hf.analysis.level_samples import even_levels, group_samples, thinned
from kvquant_hf.analysis.loss_gradients import loss_gradients
from kvquant_hf.analysis.scalar_levels import WeightedSamples, best_levels
from kvquant_hf.blocks import split_blocks
from kvquant_hf.quantizers import places_of, quantizer_of
from kvquant_hf.rotation import rotate

SMALL = {"residual_length": 16, "key": {"nbits": 2, "group_size": 16}, "value": {"nbits": 3, "group_size": 16}}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


class NudgedCache(DynamicCache):
    """Adds something to the keys or values of one layer."""

    def __init__(self, config, layer_idx, side, nudge):
        super().__init__(config=config)
        self.at, self.side, self.nudge = layer_idx, side, nudge

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == self.at:
            key_states = key_states + self.nudge if self.side == "key" else key_states
            value_states = value_states + self.nudge if self.side == "value" else value_states
        return key_states, value_states


@torch.no_grad()
def loss_of(model, ids, cache) -> float:
    logits = model(ids[None], use_cache=True, **cache_kwargs(cache)).logits[0, :-1]
    return float(cross_entropy(logits, ids[1:], reduction="sum"))


# ---- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_gradients_are_those_of_finite_differences(family, side):
    """Of keys before the rotary embedding, whichever way the loss depends on them, through later layers too."""
    model, ids = tiny_model(family).double(), tokens(40)
    cache = QuantCache(model, KVQuantConfig())
    found = loss_gradients(model, ids, cache.quantized_layers)
    assert tuple(found) == cache.quantized_layers
    generator = torch.Generator().manual_seed(1)
    for index, layer in found.items():
        states, gradient = getattr(layer, side), getattr(layer, f"{side}_gradient")
        rotation = cache.quantized_layer(index).rotation if side == "key" else None
        assert (rotation is None) == (side == "value" or family == "gpt2")
        for _ in range(3):
            nudge = torch.randn(states.shape, generator=generator, dtype=torch.float64)
            turned = nudge
            if rotation is not None:
                angles = rotation.tables(torch.arange(40))
                turned = rotation.apply(nudge, *(angle.double() for angle in angles))
            step = 5e-4  # norms are computed in float32
            ends = [
                loss_of(model, ids, NudgedCache(model.config, index, side, sign * step * turned)) for sign in (1, -1)
            ]
            slope = (ends[0] - ends[1]) / (2 * step)
            mine = split_blocks(gradient, 8, 0, rotation).flatten(2, 3)
            torch.testing.assert_close(float((mine.double() * nudge).sum()), slope, rtol=5e-3, atol=5e-3)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_the_last_token_has_no_gradient_and_modes_do_not_matter():
    model, ids = tiny_model("llama"), tokens(30)
    found = loss_gradients(model, ids, [0, 1])
    assert all((layer.value_gradient[:, :, -1] == 0).all() for layer in found.values())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = loss_gradients(model, ids, [0, 1])
        for index in found:
            torch.testing.assert_close(again[index].key_gradient, found[index].key_gradient)
    with pytest.raises(ValueError, match=r"T >= 2, got \[1\]"):
        loss_gradients(model, ids[:1], [0])
    with pytest.raises(ValueError, match=r"reads other tensors than the layers \[5\]"):
        loss_gradients(model, ids, [0, 5])


def test_latent_attention_is_refused():
    model = tiny_model("deepseek_v3")
    layers = QuantCache(model).quantized_layers
    try:
        found = loss_gradients(model, tokens(30), layers)
    except ValueError as error:
        assert "latent" in str(error)
    else:  # versions that store what attention reads
        assert set(found) == set(layers)


# ---- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", ["none", "hadamard", "grouped_heads"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_samples_are_in_the_units_of_the_groups(granularity, symmetric, rotation, outliers):
    """A squared error of a sample times its weight is that of the entry times its squared slope."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 4, 64, 24, generator=generator) ** 3
    states[:, 1, :, 3] = 0.5  # a constant channel
    gradient = torch.randn(1, 4, 64, 24, generator=generator)
    spec = QuantSpec(
        3, granularity, 16, symmetric=symmetric, rotation=rotation, outliers=outliers, levels=even_levels(3)
    )
    values, weights = group_samples(states, gradient, spec, 32, 4, None)
    assert values.shape == weights.shape and values.abs().max() <= 1.002 and weights.min() >= 0
    kept = states.numel() - 4 * 2 * spec.num_outliers(32 * 24)
    constant = 64 if rotation == "none" and granularity == "per_channel" and not symmetric else 0
    assert kept - constant <= len(values) <= kept

    # What a cache of these levels loses, entry by entry, by hand.
    table = torch.tensor(even_levels(3))
    nearest = (values[:, None] - table).abs().amin(-1)
    mine = (weights.double() * nearest.double().square()).sum()
    rows, slopes = (split_blocks(part, 32, 4, None) for part in (states, gradient))
    rows, slopes = rotate(rows, rotation), rotate(slopes, rotation)
    if granularity == "per_channel":
        rows, slopes = rows.transpose(-1, -2), slopes.transpose(-1, -2)
    quantizer = quantizer_of(spec)
    groups = quantizer.quantize(rows)
    error = quantizer.dequantize(groups) - rows
    if groups.outliers is not None:
        error = error.flatten(-2).scatter(-1, places_of(groups.outliers.places), 0.0).view(rows.shape)
    lost = (slopes * error).double().square().sum()
    assert float(mine) == pytest.approx(float(lost), rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_are_sampled_as_the_projection_made_them(family):
    """The sinks left out, the rotary embedding undone at the right positions."""
    model, ids = tiny_model(family), tokens(40)
    index = QuantCache(model).quantized_layers[0]
    attention = model.model.layers[index].self_attn
    seen = []
    hooked = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
    hook = hooked.register_forward_hook(lambda module, inputs, output: seen.append(output))
    layer = loss_gradients(model, ids, [index])[index]
    hook.remove()
    heads, head_dim = layer.key.shape[1], layer.key.shape[3]
    before = seen[0].detach().reshape(1, *((40, heads) if seen[0].ndim == 3 else seen[0].shape[1:3]), head_dim)
    before = before.transpose(1, 2) if before.shape[1] == 40 else before
    rotation = QuantCache(model).quantized_layer(index).rotation
    spec = QuantSpec(2, group_size=32)
    values, weights = group_samples(
        layer.key[:, :, 4:36], torch.ones_like(layer.key[:, :, 4:36]), spec, 32, 4, rotation
    )
    channels = before[0, :, 4:36].transpose(-1, -2)
    low, high = channels.amin(-1, keepdim=True), channels.amax(-1, keepdim=True)
    want = (2 * channels - high - low) / (high - low)
    torch.testing.assert_close(values, want.flatten(), atol=3e-3, rtol=0)
    assert torch.isfinite(weights).all()


def test_thinning_draws_the_same_ones_each_time():
    values = torch.arange(1000.0)
    few = thinned(values, 2 * values, 100)
    assert torch.equal(few[1], 2 * few[0]) and len(few[0]) == len(few[0].unique()) == 100
    assert torch.equal(few[0], thinned(values, values, 100)[0]) and few[0].max() > 900
    assert thinned(values, values, 1000)[0] is values


# ---- calibration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
@pytest.mark.parametrize("q_norm", [False, True])
def test_levels_lose_less_than_even_ones_and_serve_a_cache(family, q_norm):
    model, windows = tiny_model(family), tokens(2, 100)
    config = KVQuantConfig.from_dict(SMALL)
    ticks = []
    found = calibrate_levels(model, windows, config, q_norm, progress=lambda: ticks.append(1))
    layers = QuantCache(model).quantized_layers
    assert len(ticks) == 2 and tuple(found.levels) == layers
    assert family != "gemma3" or len(layers) < model.config.num_hidden_layers
    for index, sides in found.levels.items():
        resolved = QuantCache(model, found.config).quantized_layer(index).config
        for side, entry in sides.items():
            spec = getattr(config, side)
            assert getattr(resolved, side) == dataclasses.replace(spec, levels=entry.levels)
            assert len(entry.levels) == 2**spec.nbits and entry.samples > 1000
            if q_norm:
                torch.testing.assert_close(
                    torch.tensor(entry.decoded_moments), torch.tensor(entry.moments), atol=5e-3, rtol=0
                )
            else:
                assert 0 < entry.error <= min(entry.even_error, entry.gaussian_error)
    assert calibrate_levels(model, windows, config, q_norm) == found
    assert KVQuantConfig.from_dict(found.config.to_dict()) == found.config
    assert found.config.nominal_bits(16) == config.nominal_bits(16)
    cache = QuantCache(model.config, found.config)
    with torch.no_grad():
        for part in windows.split(23, dim=1):
            logits = model(part, **cache_kwargs(cache)).logits
    assert torch.isfinite(logits).all() and cache.quantized_length(layers[0]) >= 32


def test_levels_are_the_best_for_the_samples_of_all_windows():
    """Put together by hand: keys before the rotary embedding, weights, sinks left out, one layer at a time."""
    model, windows = tiny_model("llama"), tokens(2, 105)
    config = KVQuantConfig.from_dict(SMALL)
    cache, found = QuantCache(model, config), calibrate_levels(model, windows, config)
    gradients = [loss_gradients(model, window, [0, 1]) for window in windows]
    for index, side in ((0, "key"), (1, "key"), (1, "value")):
        rotation = cache.quantized_layer(index).rotation if side == "key" else None
        parts = [
            group_samples(
                getattr(layers[index], side)[:, :, 4:100],
                getattr(layers[index], f"{side}_gradient")[:, :, 4:100],
                getattr(config, side),
                16,
                4,
                rotation,
            )
            for layers in gradients
        ]
        samples = WeightedSamples(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        entry, nbits = found.levels[index][side], getattr(config, side).nbits
        assert entry.levels == tuple(best_levels(samples, 2**nbits).tolist())
        assert entry.samples == len(samples) == 2 * 2 * 96 * 16
        assert entry.error == pytest.approx(samples.error(torch.tensor(entry.levels, dtype=torch.float64)))


def test_gradients_decide_the_levels():
    model, windows = tiny_model("llama"), tokens(1, 100)
    config = KVQuantConfig.from_dict(SMALL)
    weighted = calibrate_levels(model, windows, config)
    plain = calibrate_levels(model, windows, config, is_weighted=False)
    assert weighted.is_weighted and not plain.is_weighted
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    assert calibrate_levels(model, windows, config) == weighted  # parameters without gradients
    assert all(
        weighted.levels[i][side].levels != plain.levels[i][side].levels
        for i in (0, 1)
        for side in SMALL
        if side != "residual_length"
    )


def test_layers_of_other_settings_are_calibrated_as_they_are():
    layers = {
        1: {"value": {"nbits": 16}, "residual_length": 32},
        "0-1": {"key": {"nbits": 3, "rotation": "hadamard", "levels": "gaussian"}, "sink_length": 8},
    }
    config = KVQuantConfig.from_dict(SMALL | {"layers": layers})
    model, windows = tiny_model("llama"), tokens(1, 100)
    found = calibrate_levels(model, windows, config)
    assert set(found.levels[0]) == {"key", "value"} and set(found.levels[1]) == {"key"}
    for index in (0, 1):
        old = config.for_layer(index, 2, "full_attention")
        new = found.config.for_layer(index, 2, "full_attention")
        changes = {
            side: dataclasses.replace(getattr(old, side), levels=e.levels) for side, e in found.levels[index].items()
        }
        assert new == dataclasses.replace(old, **changes)
    assert len(found.levels[0]["key"].levels) == 8


def test_layers_that_differ_from_their_range_stay_as_they_are():
    """Layer 1 has the keys of the whole cache again, which the entry for both must not take from it."""
    layers = {"0-1": {"key": {"nbits": 3}, "sink_length": 8}, 1: {"key": {"nbits": 2}, "sink_length": 4}}
    config = KVQuantConfig.from_dict(SMALL | {"layers": layers})
    found = calibrate_levels(tiny_model("llama"), tokens(1, 100), config)
    for index, nbits in ((0, 3), (1, 2)):
        old, new = (each.for_layer(index, 2, "full_attention") for each in (config, found.config))
        assert len(found.levels[index]["key"].levels) == 2**nbits
        changes = {
            side: dataclasses.replace(getattr(old, side), levels=e.levels) for side, e in found.levels[index].items()
        }
        assert new == dataclasses.replace(old, **changes)


def test_a_model_without_a_say_still_gives_levels():
    """All keys alike, no gradients at all: nothing to go by."""
    model, windows = tiny_model("llama"), tokens(1, 100)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
    found = calibrate_levels(model, windows, KVQuantConfig.from_dict(SMALL | {"key": {"nbits": 2, "rope": "post"}}))
    for sides in found.levels.values():
        assert sides["key"].samples == 0 and sides["key"].error == 0.0
        assert sides["key"].levels == tuple(pytest.approx(x) for x in (-1, -1 / 3, 1 / 3, 1))
        assert all(map(math.isfinite, sides["value"].levels))


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({}, (1, 35), r"windows must hold more than sink_length=4 and a block of 32 tokens, got 35"),
        ({}, (100,), r"`windows` must be integers \[N, T\], got \[100\]"),
        ({"key": {"nbits": 8}, "value": {"nbits": 16}}, (1, 100), "levels need keys or values of 2 to 4 bits"),
        ({"key": {"clip": "mse"}}, (1, 100), "keys of layer 0 of 4-bit .*`clip` must be 'minmax', got 'mse'"),
        (
            {"key": {"promoted": 0.25}},
            (1, 100),
            "no levels can be calibrated for keys of layer 0 .*`promoted` must be 0",
        ),
        ({"value": {"metadata_nbits": 8}}, (1, 100), "for values of layer 0 .*`metadata_nbits` must be 16"),
        ({"value": {"shared_groups": 2}}, (1, 100), "for values of layer 0 .*`shared_groups` must be 1 unless"),
        ({"key": {"method": "variance_normalized"}}, (1, 100), r"`method` must be one of \('affine',\)"),
    ],
)
def test_bad_input_is_named(changes, shape, message):
    with pytest.raises(ValueError, match=message):
        calibrate_levels(tiny_model("llama"), tokens(*shape), KVQuantConfig.from_dict(changes))


def test_numbers_that_are_none_are_named():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = math.nan
    with pytest.raises(ValueError, match="are not finite"):
        calibrate_levels(model, tokens(1, 100), KVQuantConfig())
