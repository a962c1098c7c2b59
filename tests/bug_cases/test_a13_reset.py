"""A13: `reset` equals a new cache with the same settings."""

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_lengths,
    assert_reported_bytes,
    assert_same_content,
    forward,
    left_pad,
    quant_cache,
    random_ids,
    random_states,
    reachable_bytes,
    settings,
)
from tiny_models import tiny_model


@pytest.mark.parametrize("residual", [0, 16])
def test_a13_reset_then_another_batch_size(residual):
    model = tiny_model("llama")
    quant = settings(residual=residual)
    used, fresh = quant_cache(model, quant), quant_cache(model, quant)
    forward(model, random_ids(1, 90), used)
    before = reachable_bytes(used)
    used.reset()
    assert_lengths(used, 0)
    assert used.quantized_length(0) == 0
    assert reachable_bytes(used) <= 0.02 * before
    report = used.memory_report()
    assert report.tokens == report.quantized_tokens == 0
    assert report.codes == report.scales == report.residual == report.sinks == report.unused == 0
    assert repr(used) == repr(quant_cache(model, quant))
    ids, token = random_ids(3, 75, seed=1), random_ids(3, 1, seed=2)
    assert_close(forward(model, ids, used), forward(model, ids, fresh), 0.0)
    assert_close(forward(model, token, used), forward(model, token, fresh), 0.0)
    assert_same_content(used, fresh)
    assert_reported_bytes(used)


def test_a13_reset_then_another_dtype_and_shape():
    model = tiny_model("llama", num_hidden_layers=1)
    used, fresh = quant_cache(model), quant_cache(model)
    used.update(*random_states(1, 2, 90, 16), 0)
    used.reset()
    states = [part.bfloat16() for part in random_states(3, 4, 75, 16, seed=1)]
    for cache in (used, fresh):
        cache.update(states[0].clone(), states[1].clone(), 0)
    for mine, true in zip(used.dequantize(0), fresh.dequantize(0), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, true)


def test_a13_reset_forgets_the_padding():
    """The sinks of the next batch are its own first tokens, not those behind the old pads."""
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(3, 2, 100, 16)
    _, mask = left_pad(torch.ones(3, 100, dtype=torch.long), (25, 7, 0))
    used, fresh = quant_cache(model), quant_cache(model)
    used.set_padding(mask)
    used.update(keys, values, 0)
    used.reset()
    for cache in (used, fresh):
        cache.update(keys.clone(), values.clone(), 0)
    assert_same_content(used, fresh)
    assert_close(used.dequantize(0)[0][:, :, :4], keys[:, :, :4], 1e-5, "sinks")


def test_a13_reset_twice_and_before_use():
    model = tiny_model("llama")
    cache = quant_cache(model)
    cache.reset()
    cache.reset()
    forward(model, random_ids(1, 90), cache)
    cache.reset()
    cache.reset()
    assert_lengths(cache, 0)


def test_a13_generate_after_reset_repeats_itself():
    model = tiny_model("llama")
    ids = random_ids(2, 80)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    cache = quant_cache(model, Q)
    first = model.generate(ids, **options, **{CACHE_KW: cache})
    cache.reset()
    assert torch.equal(model.generate(ids, **options, **{CACHE_KW: cache}), first)
