"""A1: padded batches score as well as each prompt alone."""

import pytest
import torch
from harness import (
    GROUP,
    PASSES_POSITIONS,
    RESIDUAL,
    SINKS,
    Q,
    assert_close,
    dynamic_cache,
    each_attention,
    each_lossless,
    expected_quantized,
    forward,
    kl,
    left_pad,
    positions,
    probe,
    quant_cache,
    random_ids,
    random_states,
    roll,
    settings,
    steady_model,
)
from tiny_models import tiny_model

PADS = (25, 7, 0)
LENGTH = 60


def padded_cache(model, mask, quant=Q):
    """A cache that knows the padding, by `set_padding` where `update` is not told positions."""
    cache = quant_cache(model, quant)
    if not PASSES_POSITIONS:
        cache.set_padding(mask)
    return cache


def in_chunks(model, cache, ids, steps, mask=None, size=5):
    """Logits of `steps`, fed in chunks of `size` tokens on top of the prompt `ids`."""
    forward(model, ids, cache, mask)
    logits = []
    for chunk in steps.split(size, dim=1):
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(chunk)], dim=1)
        logits.append(forward(model, chunk, cache, mask))
    return torch.cat(logits, dim=1)


@each_lossless
@each_attention
def test_a01_lossless_padded_batch_equals_dynamic_cache(lossless, attention):
    model = tiny_model("llama", attn_implementation=attention)
    ids, mask = left_pad(random_ids(3, LENGTH), PADS)
    steps = random_ids(3, 40, seed=1)
    expected, actual = dynamic_cache(model), quant_cache(model, lossless)
    prefill = forward(model, ids, actual, mask)
    reference = forward(model, ids, expected, mask)
    assert_close(prefill[mask.bool()], reference[mask.bool()])
    for index in range(steps.shape[1]):
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        token = steps[:, index : index + 1]
        assert_close(forward(model, token, actual, mask), forward(model, token, expected, mask))


@pytest.mark.parametrize("announce", ["position_ids", "set_padding"])
def test_a01_padding_costs_no_quality(announce):
    if announce == "position_ids" and not PASSES_POSITIONS:
        pytest.skip("this Transformers version does not pass position_ids to Cache.update")
    model = tiny_model("llama")
    padded, alone = [[], [], []], [[], [], []]
    for seed in range(6):
        ids, mask = left_pad(random_ids(3, LENGTH, seed), PADS)
        steps = random_ids(3, 40, seed + 100)
        cache = quant_cache(model)
        if announce == "set_padding":
            cache.set_padding(mask)
        reference, batch = (
            in_chunks(model, dynamic_cache(model), ids, steps, mask),
            in_chunks(model, cache, ids, steps, mask),
        )
        assert cache.quantized_length(0) > 0
        for row, pad in enumerate(PADS):
            single = in_chunks(model, quant_cache(model), ids[row : row + 1, pad:], steps[row : row + 1])
            padded[row].append(kl(reference[row], batch[row]))
            alone[row].append(kl(reference[row], single[0]))
    for row in range(3):
        assert sum(padded[row]) <= 2.0 * sum(alone[row]), (row, padded[row], alone[row])


def test_a01_sinks_are_the_first_real_tokens_of_each_row():
    model = tiny_model("llama", num_hidden_layers=1)
    length = 120
    ids, mask = left_pad(random_ids(3, length), PADS)
    expected, actual = dynamic_cache(model), padded_cache(model, mask)
    forward(model, ids, expected, mask)
    forward(model, ids, actual, mask)
    longer = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
    options = {"attention_mask": longer, "position_ids": positions(longer, 1)}
    (true_keys, true_values), (keys, values) = (
        probe(model, expected, **options)[0],
        probe(model, actual, **options)[0],
    )
    first_exact = length + 1 - RESIDUAL
    for row, pad in enumerate(PADS):
        for name, true, mine in (("keys", true_keys, keys), ("values", true_values, values)):
            error = (true - mine)[row].abs().amax(dim=(0, 2))
            assert error[pad : pad + SINKS].max() < 1e-4, f"{name}: a sink of row {row} is not exact"
            assert error[first_exact:].max() < 1e-4, f"{name}: the window of row {row} is not exact"
            middle = error[max(PADS) + SINKS : expected_quantized(length)]
            assert middle.min() > 1e-3, f"{name}: row {row} holds exact tokens that should be codes"


@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_a01_pad_content_never_reaches_real_tokens(granularity, clip):
    """Statistics see real data only: keys of pad slots a thousand times larger change nothing else, bit for bit."""
    model = tiny_model("llama", num_hidden_layers=1)
    quant = settings(key={"granularity": granularity, "clip": clip}, value={"granularity": granularity, "clip": clip})
    _, mask = left_pad(random_ids(3, 100), PADS)
    keys, values = random_states(3, 2, 100, 16)
    pad = ~mask.bool()[:, None, :, None]
    results = []
    for scale in (1.0, 1000.0, float("nan")):
        cache = quant_cache(model, quant)
        cache.set_padding(mask)
        cache.update(torch.where(pad, keys * scale, keys), torch.where(pad, values * scale, values), 0)
        assert cache.quantized_length(0) == expected_quantized(100, group=32 if granularity == "per_token" else GROUP)
        results.append([torch.where(pad, 0.0, part) for part in cache.dequantize(0)])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


def test_a01_a_row_of_padding_only_harms_nobody():
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(2, 2, 100, 16)
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[1] = 0
    cache, alone = quant_cache(model), quant_cache(model)
    cache.set_padding(mask)
    cache.update(keys, values, 0)
    alone.update(keys[:1], values[:1], 0)
    for both, single in zip(cache.dequantize(0), alone.dequantize(0), strict=True):
        assert torch.isfinite(both).all()
        assert_close(both[:1], single, 0.0)


@pytest.mark.parametrize("quant", [Q, settings(residual=4096)], ids=["K4V4", "lossless"])
def test_a01_dropping_the_longest_row_keeps_the_others(quant):
    model = steady_model()
    ids, mask = left_pad(random_ids(3, LENGTH), PADS)
    steps = random_ids(3, 60, seed=1)
    keep = torch.tensor([0, 1])
    dropped, kept = padded_cache(model, mask, quant), padded_cache(model, mask[keep], quant)
    roll(model, dropped, ids, steps[:, :40], mask)
    roll(model, kept, ids[keep], steps[keep, :40], mask[keep])
    dropped.batch_select_indices(keep)
    mask = torch.cat([mask[keep], mask.new_ones(2, 40)], dim=1)
    for index in range(40, 60):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        token = steps[keep, index : index + 1]
        assert_close(forward(model, token, dropped, mask), forward(model, token, kept, mask))
    assert_close(dropped.dequantize(0)[0], kept.dequantize(0)[0], 1e-4, "keys")
