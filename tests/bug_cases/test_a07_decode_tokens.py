"""A7: tokens that arrive one by one are quantized, once each, in whole groups, without copying the history."""

import pytest
import torch
from harness import (
    GROUP,
    RESIDUAL,
    SINKS,
    assert_reported_bytes,
    dynamic_cache,
    exact_tokens,
    expected_quantized,
    forward,
    probe,
    quant_cache,
    random_ids,
    random_states,
    reachable_storages,
    settings,
)
from tiny_models import tiny_model

PROMPT, STEPS = 100, 256


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=1)


def test_a07_long_generation_is_quantized(model):
    ids, steps = random_ids(1, PROMPT), random_ids(1, STEPS, seed=1)
    expected, actual = dynamic_cache(model), quant_cache(model)
    for cache in (expected, actual):
        forward(model, ids, cache)
        for token in steps.split(1, dim=1):
            forward(model, token, cache)
    total = PROMPT + STEPS
    assert actual.quantized_length(0) == expected_quantized(total) == 336
    true, mine = probe(model, expected)[0], probe(model, actual)[0]
    for name, reference, states in zip(("keys", "values"), true, mine, strict=True):
        exact = exact_tokens(states, reference)[:total]
        trailing = int(exact.flip(0).long().cumprod(0).sum())
        assert RESIDUAL <= trailing <= RESIDUAL + GROUP, f"{name}: {trailing} trailing exact tokens"
        error = (states - reference)[:, :, PROMPT : SINKS + 336].abs().amax(dim=(0, 1, 3))
        assert error.min() > 1e-3, f"{name}: tokens of the decode phase are exact"


@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_a07_a_block_is_never_written_twice(model, clip):
    """After every step, everything that was coded before reads back bit for bit the same."""
    keys, values = random_states(2, 2, PROMPT + STEPS, 16)
    cache = quant_cache(model, settings(2, 2, key={"clip": clip}, value={"clip": clip}))
    cache.update(keys[:, :, :PROMPT], values[:, :, :PROMPT], 0)
    coded = cache.quantized_length(0)
    history = [part[:, :, : SINKS + coded].clone() for part in cache.dequantize(0)]
    for token in range(PROMPT, PROMPT + STEPS):
        cache.update(keys[:, :, token : token + 1], values[:, :, token : token + 1], 0)
        now = [part[:, :, : SINKS + cache.quantized_length(0)].clone() for part in cache.dequantize(0)]
        for before, after in zip(history, now, strict=True):
            assert torch.equal(before, after[:, :, : before.shape[2]]), f"history changed at token {token}"
        history = now
    assert cache.quantized_length(0) == 336


def test_a07_the_quantizer_sees_each_token_once(model, monkeypatch):
    """Count the elements handed to the quantizer: as many as end up coded, no more."""
    from kvquant_hf import ops
    from kvquant_hf.quantizers import QUANTIZERS

    seen = {"elements": 0}
    for cls in set(QUANTIZERS.values()):
        original = cls.quantize

        def counting(self, tensor, *args, _original=original, **kwargs):
            seen["elements"] += tensor.numel()
            return _original(self, tensor, *args, **kwargs)

        monkeypatch.setattr(cls, "quantize", counting)
    encode = ops.encode_blocks

    def counting_compiled(store, states, *args, **kwargs):
        packed = encode(store, states, *args, **kwargs)
        seen["elements"] += 0 if packed is None else states.numel()
        return packed

    monkeypatch.setattr(ops, "encode_blocks", counting_compiled)
    keys, values = random_states(1, 2, PROMPT + STEPS, 16)
    cache = quant_cache(model)
    cache.update(keys[:, :, :PROMPT], values[:, :, :PROMPT], 0)
    for token in range(PROMPT, PROMPT + STEPS):
        cache.update(keys[:, :, token : token + 1], values[:, :, token : token + 1], 0)
    assert cache.quantized_length(0) == 336
    assert seen["elements"] == 2 * 336 * 2 * 16


def test_a07_a_step_does_not_copy_the_history(model):
    """Between flushes no large buffer is replaced, and growth is amortized."""
    keys, values = random_states(1, 2, 2000, 16)
    cache = quant_cache(model)
    cache.update(keys[:, :, :1000], values[:, :, :1000], 0)
    large = {pointer for pointer, size in reachable_storages(cache).items() if size > 4096}
    assert large
    replaced = 0
    for token in range(1000, 1200):
        cache.update(keys[:, :, token : token + 1], values[:, :, token : token + 1], 0)
        now = {pointer for pointer, size in reachable_storages(cache).items() if size > 4096}
        replaced += now != large
        large = now
    assert replaced <= 200 // GROUP + 1, f"large buffers were replaced in {replaced} of 200 steps"


@pytest.mark.parametrize("how", ["one-shot", "single-steps"])
@pytest.mark.parametrize("bits", [4, 2])
def test_a07_bytes_per_token_are_those_of_the_codes(how, bits):
    """2,048 tokens, head size 64, group 32: quantized part at most 0.36 x (K4V4), 0.24 x (K2V2) of bf16."""
    model = tiny_model("llama", num_hidden_layers=1, head_dim=64)
    keys, values = (part.bfloat16() for part in random_states(1, 2, 2048, 64))
    cache = quant_cache(model, settings(bits, bits, group=32))
    with torch.no_grad():
        for part in [slice(0, 2048)] if how == "one-shot" else [slice(t, t + 1) for t in range(2048)]:
            cache.update(keys[:, :, part].clone(), values[:, :, part].clone(), 0)
    report = cache.memory_report()
    assert_reported_bytes(cache)
    assert report.tokens == 2048
    assert report.quantized_tokens == expected_quantized(2048, group=32)
    dense = report.quantized_tokens * 2 * 2 * 64 * 2
    limit = {4: 0.36, 2: 0.24}[bits]
    assert report.codes + report.scales + report.zero_points <= limit * dense
    assert report.total_bytes <= (limit + 0.06) * 2048 * 2 * 2 * 64 * 2


@pytest.mark.parametrize("bits", [4, 2])
def test_a07_nothing_else_is_held_right_after_a_prefill_of_4k(bits):
    """Views of the prompt's keys and values would keep all of them alive."""
    model = tiny_model("llama", num_hidden_layers=1, head_dim=64, max_position_embeddings=4096)
    cache = quant_cache(model, settings(bits, bits, group=32, residual=128))
    forward(model, random_ids(1, 4096), cache)
    held, report = sum(reachable_storages(cache).values()), cache.memory_report()
    assert report.total_bytes <= held <= 1.02 * report.total_bytes
    assert report.unused <= 0.06 * report.total_bytes


def test_a07_short_generation_without_prompt(model):
    """Decoding from a one-token prompt reaches the same state."""
    cache, expected = quant_cache(model), quant_cache(model)
    ids = random_ids(1, 120)
    for token in ids.split(1, dim=1):
        forward(model, token, cache)
    forward(model, ids, expected)
    assert cache.quantized_length(0) == expected.quantized_length(0) == expected_quantized(120)
    assert cache.get_seq_length() == 120
