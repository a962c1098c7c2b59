"""A6: sliding-window and hybrid models: full-attention layers are quantized, the others stay as they are."""

import re

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_reported_bytes,
    dynamic_cache,
    each_attention,
    each_lossless,
    forward,
    model_or_skip,
    quant_cache,
    random_ids,
    reachable_bytes,
    roll,
    settings,
)
from tiny_models import SLIDING_WINDOW, tiny_model
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM


@each_lossless
@each_attention
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_a06_lossless_equals_dynamic_cache_past_the_window(family, attention, lossless):
    model = model_or_skip(family, attention)
    ids, steps = random_ids(2, 50), random_ids(2, 40, seed=1)
    expected = roll(model, dynamic_cache(model), ids, steps)
    assert_close(roll(model, quant_cache(model, lossless), ids, steps), expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_a06_windowed_layers_stay_bounded_and_full_layers_hold_codes(family):
    model = tiny_model(family)
    cache = quant_cache(model)
    roll(model, cache, random_ids(1, 50), random_ids(1, 40, seed=1))
    config = model.config
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * 4
    kinds = config.layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}
    for index, (kind, layer) in enumerate(zip(kinds, cache.layers, strict=True)):
        assert cache.get_seq_length(index) == 90
        if kind == "sliding_attention":
            assert layer.keys.shape[2] <= SLIDING_WINDOW - 1 + 16
            assert reachable_bytes(layer) <= 2 * (SLIDING_WINDOW - 1 + 16) * token_bytes + 64
        else:
            assert cache.quantized_length(index) == 64
            keys, values = cache.dequantize(index)
            assert keys.shape[2] == values.shape[2] == 90
            assert reachable_bytes(layer) < 90 * token_bytes
    report = cache.memory_report()
    sliding = sum(reachable_bytes(layer) for layer in cache.layers if getattr(layer, "is_sliding", False))
    assert abs(report.other_layers - sliding) <= 0.02 * sliding


@pytest.mark.parametrize("length", [50, 400])
def test_a06_a_prompt_does_not_stay_alive_in_windowed_layers(length):
    """Transformers' windowed layers keep a slice of what they are given, and a slice keeps the whole prompt."""
    model = tiny_model("gemma3")
    cache = quant_cache(model)
    forward(model, random_ids(1, length), cache)
    token_bytes = 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            assert reachable_bytes(layer) <= 1.3 * (SLIDING_WINDOW - 1) * token_bytes + 64
    assert_reported_bytes(cache)


def test_a06_repr_counts_the_quantized_layers():
    text = repr(quant_cache(tiny_model("gemma3")))
    assert re.search(r"\b2\b\D{1,20}\b4\b", text), text


@each_lossless
def test_a06_assisted_decoding_crosses_the_window(lossless):
    model = tiny_model("gemma3")
    ids = random_ids(1, 5).repeat(1, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = quant_cache(model, lossless)
    assert cache.is_croppable
    actual = model.generate(ids, **options, prompt_lookup_num_tokens=4, **{CACHE_KW: cache})
    assert torch.equal(actual, expected)


def qwen3_next():
    config = Qwen3NextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(config).eval()


def test_a06_linear_attention_works_or_is_refused_at_construction():
    model = qwen3_next()
    assert "linear_attention" in model.config.layer_types
    try:
        cache = quant_cache(model, settings(residual=4096))
    except ValueError as error:
        assert "linear_attention" in str(error)
        return
    ids, steps = random_ids(1, 50), random_ids(1, 20, seed=1)
    assert_close(roll(model, cache, ids, steps), roll(model, dynamic_cache(model), ids, steps))
    quantized = quant_cache(model, Q)
    roll(model, quantized, ids, steps)
    full = model.config.layer_types.index("full_attention")
    assert quantized.quantized_length(full) > 0


@pytest.mark.parametrize("layer_type", ["chunked_attention", "heavily_compressed_attention", "no_such_attention"])
def test_a06_other_layer_types_work_or_are_refused_by_name(layer_type):
    config = tiny_model("gemma3").config
    config.layer_types = ["full_attention", layer_type, "full_attention", layer_type]
    config.attention_chunk_size = 16
    try:
        cache = quant_cache(config)
    except ValueError as error:
        assert layer_type in str(error)
        return
    assert layer_type == "chunked_attention"
    assert type(cache.layers[1]) is not type(cache.layers[0])


def test_a06_a_model_of_windowed_layers_only_is_refused_by_name():
    """There is nothing to quantize; a cache that silently quantizes nothing would be worse."""
    with pytest.raises(ValueError, match="sliding_attention"):
        quant_cache(tiny_model("mistral-sliding"))
