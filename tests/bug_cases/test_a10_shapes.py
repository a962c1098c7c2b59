"""A10: grouped heads, one head, unequal head sizes of keys and values, head sizes that divide nothing."""

import pytest
import torch
from harness import (
    assert_close,
    assert_reported_bytes,
    dynamic_cache,
    each_attention,
    each_lossless,
    expected_quantized,
    feed,
    forward,
    left_pad,
    plain,
    quant_cache,
    random_ids,
    random_states,
    roll,
    settings,
    steady_model,
)
from tiny_models import tiny_model


@each_lossless
@each_attention
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pads", [(9, 0), None], ids=["left-padded", "unpadded"])
def test_a10_gqa_lossless_equals_dynamic_cache(kv_heads, attention, lossless, pads):
    model = tiny_model("llama", num_key_value_heads=kv_heads, attn_implementation=attention)
    ids, mask = random_ids(2, 60), None
    if pads:
        ids, mask = left_pad(ids, pads)
    steps = random_ids(2, 20, seed=1)
    expected = roll(model, dynamic_cache(model), ids, steps, mask)
    assert_close(roll(model, quant_cache(model, lossless), ids, steps, mask), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 24, 40])
@pytest.mark.parametrize("pads", [(9, 0), None], ids=["left-padded", "unpadded"])
def test_a10_sdpa_reads_what_eager_reads(kv_heads, head_dim, pads):
    """The fused path over codes equals attention over the dequantized tensors."""
    ids, mask = random_ids(2, 60), None
    if pads:
        ids, mask = left_pad(ids, pads)
    steps = random_ids(2, 20, seed=1)
    logits = []
    for attention in ("eager", "sdpa"):
        model = steady_model(num_key_value_heads=kv_heads, head_dim=head_dim, attn_implementation=attention)
        cache = quant_cache(model)
        logits.append(roll(model, cache, ids, steps, mask))
        assert cache.quantized_length(0) == expected_quantized(80)
        # Several queries on top of coded history: a draft, then a longer chunk.
        for length in (3, 20):
            if mask is None:
                logits[-1] = torch.cat([logits[-1], forward(model, random_ids(2, length, seed=2), cache)], dim=1)
    assert_close(*logits)


@pytest.mark.parametrize("key_dim", [16, 24, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("value_dim", [16, 40, 128])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_a10_unequal_head_sizes(key_dim, value_dim, group):
    model = tiny_model("llama", num_hidden_layers=1, head_dim=key_dim)
    length = 2 * group + 45
    keys, values = random_states(2, 2, length, key_dim, value_dim)
    cache = quant_cache(model, settings(8, 8, group=group, key={"rope": "post"}))
    feed(cache, keys[:, :, :-1], values[:, :, :-1], [length - 3, 1, 1])
    out = cache.update(keys[:, :, -1:], values[:, :, -1:], 0)
    assert tuple(out[0].shape) == (2, 2, length, key_dim)
    assert tuple(out[1].shape) == (2, 2, length, value_dim)
    assert cache.quantized_length(0) == expected_quantized(length, group=group) > 0
    for returned, said, true in zip(out, cache.dequantize(0), (keys, values), strict=True):
        assert_close(plain(returned), said, 1e-6, "update and dequantize")
        assert_close(said, true, 0.03, "8-bit error")
    assert_reported_bytes(cache)


def test_a10_spec_example_24_and_16():
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(2, 2, 40, 24, 16)
    cache = quant_cache(model, settings(residual=0, key={"rope": "post"}))
    shapes = [tuple(part.shape) for part in cache.update(keys, values, 0)]
    assert shapes == [(2, 2, 40, 24), (2, 2, 40, 16)]
    for said, true in zip(cache.dequantize(0), (keys, values), strict=True):
        assert_close(said, true, 0.4, "4-bit error")


@pytest.mark.parametrize("head_dim", [24, 8, 32])
def test_a10_a_head_size_other_than_the_configs_is_never_wrong(head_dim):
    """Rotation tables are made for the config's head size; another one works or raises, and nothing in between."""
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(2, 2, 60, head_dim)
    cache = quant_cache(model, settings(8, 8))
    try:
        cache.update(keys, values, 0)
    except ValueError as error:
        assert str(head_dim) in str(error)
        return
    assert_close(cache.dequantize(0)[0], keys, 0.05, "keys")


@pytest.mark.parametrize("lengths", [[1], [15], [16], [17], [63], [1, 1, 1], [20, 1], [36, 1], [52]])
def test_a10_sdpa_equals_eager_at_every_length(lengths):
    """Histories that are empty, a block less one, a block, a block and one, with one and several queries."""
    for residual, sinks in ((0, 0), (16, 4), (1, 1)):
        outputs = []
        for attention in ("eager", "sdpa"):
            model = steady_model(attn_implementation=attention)
            cache = quant_cache(model, settings(residual=residual, sinks=sinks))
            parts = [
                forward(model, random_ids(2, length, seed=index), cache)
                for index, length in enumerate([*lengths, 1, 4, 1])
            ]
            outputs.append(torch.cat(parts, dim=1))
        assert_close(*outputs)
