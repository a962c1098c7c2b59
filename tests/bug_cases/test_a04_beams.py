"""A4: reordering rows moves every stored tensor."""

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_reported_bytes,
    assert_same_content,
    expected_quantized,
    forward,
    quant_cache,
    random_ids,
    settings,
)
from tiny_models import tiny_model

ORDER = torch.tensor([2, 0, 0])
VARIANTS = {
    "K4V4": Q,
    "no-residual": settings(residual=0),
    "no-sinks": settings(sinks=0),
    "K3V2": settings(3, 2),
    "K8V16": settings(8, 16),
    "K16V4": settings(16, 4),
    "per-token-keys": settings(key={"granularity": "per_token"}),
    "per-channel-values": settings(value={"granularity": "per_channel"}),
    "hadamard": settings(key={"rope": "post", "rotation": "hadamard"}, value={"rotation": "hadamard"}),
    "symmetric": settings(key={"symmetric": True}, value={"symmetric": True}),
}


@pytest.mark.parametrize("length", [80, 4 + 64, 4 + 64 + 16, 20, 3], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("quant", list(VARIANTS.values()), ids=list(VARIANTS))
def test_a04_reorder_equals_a_fresh_cache_of_the_reordered_rows(quant, length):
    model = tiny_model("llama")
    ids = random_ids(3, length)
    actual, expected = quant_cache(model, quant), quant_cache(model, quant)
    forward(model, ids, actual)
    forward(model, ids[ORDER], expected)
    actual.reorder_cache(ORDER)
    assert_same_content(actual, expected, 1e-4)
    for seed in range(20):
        token = random_ids(3, 1, seed=seed + 9)
        assert_close(forward(model, token, actual), forward(model, token, expected), 1e-4)
    assert_same_content(actual, expected, 1e-4)
    assert_reported_bytes(actual)


def test_a04_rows_differ_enough_to_notice():
    """The comparison above means something: without the reorder it fails by far."""
    model = tiny_model("llama")
    ids, token = random_ids(3, 80), random_ids(3, 1, seed=9)
    plain, expected = quant_cache(model), quant_cache(model)
    forward(model, ids, plain)
    forward(model, ids[ORDER], expected)
    assert (forward(model, token, plain) - forward(model, token, expected)).abs().max() > 0.5


def test_a04_rows_that_share_a_parent_do_not_share_memory():
    model = tiny_model("llama")
    cache = quant_cache(model)
    forward(model, random_ids(3, 80), cache)
    cache.reorder_cache(ORDER)
    for token in random_ids(3, 40, seed=4).split(1, dim=1):
        forward(model, token, cache)
    keys, _ = cache.dequantize(1)
    coded = 4 + expected_quantized(80)
    assert_close(keys[1, :, :coded], keys[2, :, :coded], 0.0, "common history")
    assert (keys[1, :, 80:] - keys[2, :, 80:]).abs().max() > 0.1


@pytest.mark.parametrize("prompt", [60, 4 + 48, 4 + 48 - 1, 4 + 48 + 1, 4])
@pytest.mark.parametrize(
    "quant",
    [settings(residual=4096), settings(16, 16), settings(16, 16, residual=0), settings(16, 16, residual=0, sinks=0)],
    ids=["long-residual", "16-bit", "16-bit-no-residual", "16-bit-no-window-at-all"],
)
def test_a04_lossless_beam_search_returns_the_same_ids(quant, prompt):
    model = tiny_model("llama")
    ids = random_ids(2, prompt)
    options = {"max_new_tokens": 25, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    cache = quant_cache(model, quant)
    actual = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **{CACHE_KW: cache})
    assert torch.equal(actual, expected)
    assert cache.get_seq_length() == prompt + 24


@pytest.mark.parametrize("residual", [0, 16])
@pytest.mark.parametrize("prompt", [4, 4 + 47, 4 + 48, 4 + 64])
def test_a04_quantized_beam_search_keeps_each_beams_own_history(residual, prompt):
    """The cache after beam search holds what a fresh cache holds after the winning histories, row by row."""
    model = tiny_model("llama", num_hidden_layers=1)
    ids = random_ids(1, prompt)
    quant = settings(8, 8, residual=residual)
    cache, tracked = quant_cache(model, quant), {}
    original = cache.reorder_cache

    def spy(beam_idx):
        original(beam_idx)
        tracked["reorders"] = tracked.get("reorders", 0) + 1

    cache.reorder_cache = spy
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, num_beams=3, num_return_sequences=3,
        do_sample=False, **{CACHE_KW: cache},
    )  # fmt: skip
    assert tracked["reorders"] >= 28
    assert cache.get_seq_length() == prompt + 29
    assert cache.quantized_length(0) == expected_quantized(prompt + 29, residual=residual)
    # One layer: stored keys depend on token and position only, so each cached row must spell some token sequence.
    fresh = quant_cache(model, settings(residual=4096))
    forward(model, out[:, : prompt + 29], fresh)
    rows = cache.dequantize(0)[0][:, :, : prompt + 20]
    spelled = fresh.dequantize(0)[0][:, :, : prompt + 20]
    gap = torch.cdist(rows.flatten(1), spelled.flatten(1), p=float("inf")).min(dim=1).values
    assert gap.max() < 0.5, gap
