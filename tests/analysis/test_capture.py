"""What is captured is what eager attention computes with."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache

from kvquant_hf import QuantCache
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.analysis import capture
from kvquant_hf.layer import QuantLayer

TOKENS = 48


def quantized_layers(model):
    return [i for i, layer in enumerate(QuantCache(model).layers) if isinstance(layer, QuantLayer)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma2", "gpt_neox"])
def test_capture_equals_eager_attention(family):
    model = tiny_model(family, attn_implementation="eager")
    ids = torch.randint(1, 128, (TOKENS,))
    layers = quantized_layers(model)
    found = {}
    capture(model, ids, layers, lambda layer: found.update({layer.layer_idx: layer}), queries=20)
    assert list(found) == layers
    assert len(layers) < model.config.num_hidden_layers if family.startswith("gemma") else len(layers) == 2

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(ids[None], use_cache=True, output_attentions=True, **cache_kwargs(cache))
    for index, layer in found.items():
        probabilities = layer.log_probabilities(layer.raw_scores(layer.key)).exp()
        torch.testing.assert_close(probabilities, out.attentions[index][:, :, -20:], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.key, cache.layers[index].keys)
        torch.testing.assert_close(layer.value, cache.layers[index].values)
        hidden = torch.arange(TOKENS) > torch.arange(TOKENS - 20, TOKENS)[:, None]
        assert torch.equal(layer.visible[0, 0], ~hidden)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_the_captured_run_is_the_models_own(family):
    """Layers further up see the right hidden states, and the model is left as it was."""
    model = tiny_model(family)
    before = model.config._attn_implementation
    ids = torch.randint(1, 128, (TOKENS,))
    top = quantized_layers(model)[-1]
    found = []
    capture(model, ids, [top], found.append, queries=1)
    assert model.config._attn_implementation == before
    cache = DynamicCache(config=model.config)
    eager = tiny_model(family, attn_implementation="eager")
    with torch.no_grad():
        eager(ids[None], use_cache=True, **cache_kwargs(cache))
    torch.testing.assert_close(found[0].key, cache.layers[top].keys, atol=1e-5, rtol=1e-4)
    assert found[0].query.shape[2] == 1


def test_a_failing_consumer_leaves_the_model_as_it_was():
    model = tiny_model("llama")

    def fail(layer):
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        capture(model, torch.randint(1, 128, (8,)), [0, 1], fail)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("deepseek_v3", "other tensors than it stores"),
        ("bloom", "attention interface"),
        ("gpt_oss", "s_aux"),
    ],
)
def test_attention_that_cannot_be_followed_is_refused(family, message):
    model = tiny_model(family)
    with pytest.raises(ValueError, match=message):
        capture(model, torch.randint(1, 128, (8,)), quantized_layers(model), lambda layer: None)


def test_queries_must_be_positive():
    with pytest.raises(ValueError, match="`queries` must be"):
        capture(tiny_model("llama"), torch.tensor([1, 2]), [0], lambda layer: None, queries=0)
