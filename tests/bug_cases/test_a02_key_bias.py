"""A2: a constant offset of hundreds on a key channel (Qwen2's `k_proj` bias) costs nothing at 4 bits."""

import pytest
import torch
from harness import dynamic_cache, kl, quant_cache, random_ids, scored_chunk, settings
from tiny_models import tiny_model


def quality(quant, offset, seeds=4):
    """Mean KL of a tiny Qwen2 whose key bias is zero but for `+offset` at channel 3 and `-offset` at channel 19."""
    total = 0.0
    prefill, step = 60, 10
    for seed in range(seeds):
        model = tiny_model("qwen2", seed=seed)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias.zero_()
                layer.self_attn.k_proj.bias[3] = offset
                layer.self_attn.k_proj.bias[19] = -offset
        ids = random_ids(2, 120, seed)
        cache = quant_cache(model, quant)
        reference = scored_chunk(model, dynamic_cache(model), ids, prefill, step)
        total += kl(reference, scored_chunk(model, cache, ids, prefill, step))
        assert cache.quantized_length(0) > 60
    return total / seeds


@pytest.mark.parametrize("group", [16, 32])
def test_a02_constant_key_offset_is_absorbed(group):
    quant = settings(group=group)
    assert quality(quant, 300.0) <= 2.0 * quality(quant, 0.0)


def test_a02_the_measure_sees_the_fault():
    """Per-token key groups are what fails in the reports; the same measure must reject them."""
    per_token = settings(key={"granularity": "per_token"})
    assert quality(per_token, 300.0) > 5.0 * quality(per_token, 0.0)
