"""A15: dynamic NTK RoPE: the result equals one of the two references, never a mixture; the model is left alone."""

import pytest
import torch
from harness import (
    assert_close,
    dynamic_cache,
    each_lossless,
    forward,
    probe,
    quant_cache,
    random_ids,
    roll,
    settings,
)
from tiny_models import tiny_model


@pytest.fixture
def model():
    model = tiny_model("llama-dynamic", num_hidden_layers=1)
    assert model.config.max_position_embeddings == 64
    return model


@pytest.fixture
def references(model):
    """Last logits after 50 + 60 tokens, with `DynamicCache` and without any cache; they differ by far."""
    ids, steps = random_ids(1, 50), random_ids(1, 60, seed=1)
    cached = roll(model, dynamic_cache(model), ids, steps)[:, -1]
    model.model.rotary_emb.__init__(model.config)
    uncached = forward(model, torch.cat([ids, steps], dim=1), None)[:, -1]
    model.model.rotary_emb.__init__(model.config)
    assert (cached - uncached).abs().max() > 0.1
    return ids, steps, cached, uncached


@each_lossless
def test_a15_lossless_equals_one_reference(model, references, lossless):
    ids, steps, cached, uncached = references
    actual = roll(model, quant_cache(model, lossless), ids, steps)[:, -1]
    assert min((actual - cached).abs().max(), (actual - uncached).abs().max()) <= 1e-4


@pytest.mark.parametrize("residual", [0, 16])
def test_a15_stored_keys_are_no_mixture(model, residual):
    """8-bit keys read back as one of the two references; un-rotating with another base would be far from both."""
    ids, steps = random_ids(1, 50), random_ids(1, 60, seed=1)
    cached, quantized, whole = dynamic_cache(model), quant_cache(model, settings(8, 8, residual=residual)), None
    roll(model, cached, ids, steps)
    model.model.rotary_emb.__init__(model.config)
    roll(model, quantized, ids, steps)
    model.model.rotary_emb.__init__(model.config)
    whole = dynamic_cache(model)
    forward(model, torch.cat([ids, steps], dim=1), whole)
    assert quantized.quantized_length(0) > 64
    as_fed, recomputed = cached.layers[0].keys, whole.layers[0].keys
    assert (as_fed - recomputed).abs().max() > 0.5
    mine = quantized.dequantize(0)[0]
    error = min((mine - as_fed).abs().max(), (mine - recomputed).abs().max())
    assert error < 0.03 * as_fed.abs().max()


@pytest.mark.parametrize("given", ["config", "model"])
def test_a15_the_models_rotary_module_is_untouched(model, given):
    """After the same forwards, the rotary module's state is what it is with `DynamicCache`."""
    states = []
    for make in (dynamic_cache, lambda m: quant_cache(m.config) if given == "config" else _from_model(m)):
        model.model.rotary_emb.__init__(model.config)
        cache = make(model)
        roll(model, cache, random_ids(1, 50), random_ids(1, 60, seed=1))
        probe(model, cache)
        states.append(_state(model.model.rotary_emb))
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        other = states[1][name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def _from_model(model):
    from kvquant_hf import QuantCache

    return QuantCache(model, settings())


def _state(module):
    fields = {name: value for name, value in vars(module).items() if isinstance(value, int | float | torch.Tensor)}
    return {**fields, **dict(module.named_buffers())}


def test_a15_dequantize_does_not_depend_on_when_it_is_called(model):
    """Reading before the switch length is passed and after it gives the same stored prefix."""
    cache = quant_cache(model, settings(8, 8))
    forward(model, random_ids(1, 60), cache)
    before = cache.dequantize(0)[0].clone()
    for token in random_ids(1, 40, seed=1).split(1, dim=1):
        forward(model, token, cache)
    # Tokens of the window were coded meanwhile: 8 bits.
    assert_close(cache.dequantize(0)[0][:, :, :60], before, 0.03 * before.abs().max().item(), "keys")
