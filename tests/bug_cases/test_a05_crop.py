"""A5: cropping works in any state, so assisted and prompt-lookup decoding do."""

import copy

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_lengths,
    assert_reported_bytes,
    assert_same_content,
    dynamic_cache,
    each_lossless,
    forward,
    quant_cache,
    random_ids,
    random_states,
    settings,
)
from tiny_models import tiny_model


def generate(model, ids, cache=None, **options):
    if cache is not None:
        options[CACHE_KW] = cache
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, **options)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def repetitive_prompt():
    """40 tokens in which n-grams recur, so that prompt lookup finds candidates."""
    return random_ids(1, 10).repeat(1, 4)


@pytest.mark.parametrize("how", ["prompt-lookup", "assistant"])
class TestAssisted:
    def options(self, how):
        if how == "prompt-lookup":
            return {"prompt_lookup_num_tokens": 4}
        return {"assistant_model": tiny_model("llama", seed=1, num_hidden_layers=1)}

    @each_lossless
    def test_a05_lossless_equals_greedy(self, model, repetitive_prompt, how, lossless):
        cache = quant_cache(model, lossless)
        actual = generate(model, repetitive_prompt, cache, **self.options(how))
        assert torch.equal(actual, generate(model, repetitive_prompt))
        assert cache.get_seq_length() == actual.shape[1] - 1

    @pytest.mark.parametrize("residual", [0, 16])
    def test_a05_quantized_runs(self, model, repetitive_prompt, how, residual):
        cache = quant_cache(model, settings(residual=residual))
        out = generate(
            model, repetitive_prompt, cache, return_dict_in_generate=True, output_logits=True, **self.options(how)
        )
        assert out.sequences.shape[1] == 70
        assert all(torch.isfinite(step).all() for step in out.logits)
        assert cache.get_seq_length() == 69
        assert cache.quantized_length(0) > 0


def test_a05_rejected_drafts_leave_no_trace(model, repetitive_prompt):
    """The 8-bit cache after prompt lookup holds the accepted tokens and nothing of the rejected ones."""
    cache = quant_cache(model, settings(8, 8))
    out = generate(model, repetitive_prompt, cache, prompt_lookup_num_tokens=6)
    fresh = dynamic_cache(model)
    forward(model, out[:, :-1], fresh)
    for mine, true in (
        (cache.dequantize(0)[0], fresh.layers[0].keys),
        (cache.dequantize(0)[1], fresh.layers[0].values),
    ):
        assert_close(mine, true, 0.03 * true.abs().max().item(), "layer 0")


def test_a05_is_croppable_before_and_after_use(model):
    cache = quant_cache(model)
    assert cache.is_croppable is True
    forward(model, random_ids(1, 90), cache)
    assert cache.is_croppable is True


@pytest.mark.parametrize("length", [0, 3, 10, 90], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("quant", [Q, settings(residual=4096), settings(16, 16)], ids=["K4V4", "residual", "16-bit"])
def test_a05_crop_argument(model, quant, length):
    cache = quant_cache(model, quant)
    if length:
        forward(model, random_ids(2, length), cache)
    with pytest.raises(ValueError, match="5"):
        cache.crop(5)
    assert_lengths(cache, length)
    cache.crop(0)
    assert_lengths(cache, length)
    cache.crop(-1000)
    assert_lengths(cache, 0)
    cache.crop(-1)
    assert_lengths(cache, 0)


@pytest.mark.parametrize("remove", [5, 41, 97, 100, 1000])
def test_a05_crop_takes_a_tensor(model, remove):
    """Before 5.24 assisted decoding passes the count as a tensor of no dimensions."""
    by_tensor, by_number = quant_cache(model), quant_cache(model)
    for cache in (by_tensor, by_number):
        forward(model, random_ids(2, 100), cache)
    by_tensor.crop(-torch.tensor(remove))
    by_number.crop(-remove)
    assert type(by_tensor.get_seq_length()) is int
    ids = random_ids(2, 40, seed=1)
    assert_close(forward(model, ids, by_tensor), forward(model, ids, by_number), 0.0)
    assert_same_content(by_tensor, by_number)


def test_a05_crop_leaves_uninitialized_layers_alone(model):
    cache = quant_cache(model)
    keys, values = random_states(1, 2, 60, 16)
    cache.update(keys, values, 0)
    cache.crop(-10)
    assert cache.get_seq_length(0) == 50
    assert cache.get_seq_length(1) == 0
    cache.update(keys, values, 1)
    assert cache.get_seq_length(1) == 60


# 100 tokens: sinks 0..3, blocks to 83 (5 x 16), window 84..99.
CROPS = {
    "in-window": 5,
    "whole-window": 16,
    "into-last-block": 20,
    "to-a-block-boundary": 32,
    "middle-of-a-block": 41,
    "leaves-one-token-of-a-block": 95,
    "leaves-sinks": 96,
    "into-sinks": 98,
    "leaves-one-token": 99,
    "all": 100,
}


@pytest.mark.parametrize("remove", list(CROPS.values()), ids=list(CROPS))
@pytest.mark.parametrize("residual", [0, 16, 4096])
def test_a05_crop_keeps_what_remains_and_appends_after_it(model, remove, residual):
    keys, values = random_states(2, 2, 100, 16)
    more_keys, more_values = random_states(2, 2, 100, 16, seed=1)
    cache = quant_cache(model, settings(8, 8, residual=residual))
    for layer_idx in range(2):
        cache.update(keys, values, layer_idx)
    before = [part.clone() for part in cache.dequantize(0)]
    kept = 100 - remove
    cache.crop(-remove)
    assert_lengths(cache, kept)
    assert cache.quantized_length(0) <= kept
    assert_reported_bytes(cache)
    if kept:
        for old, new in zip(before, cache.dequantize(0), strict=True):
            assert_close(new, old[:, :, :kept], 0.0, "kept tokens")
    for token in range(60):
        part = slice(token, token + 1)
        for layer_idx in range(2):
            cache.update(more_keys[:, :, part], more_values[:, :, part], layer_idx)
        assert_lengths(cache, kept + token + 1)
    for now, old, more in zip(cache.dequantize(0), before, (more_keys, more_values), strict=True):
        assert_close(now[:, :, :kept], old[:, :, :kept], 0.03, "kept tokens after 60 more")
        assert_close(now[:, :, kept:], more[:, :, :60], 0.03, "new tokens")
        if residual:
            window = min(residual, 60)
            assert_close(now[:, :, -window:], more[:, :, 60 - window : 60], 1e-6, "window of new tokens")
    assert_reported_bytes(cache)


@pytest.mark.parametrize("remove", [1, 15, 16, 17, 40, 97])
def test_a05_lossless_crop_equals_dynamic_cache(model, remove):
    ids, more = random_ids(2, 100), random_ids(2, 30, seed=1)
    for quant in (settings(residual=4096), settings(16, 16)):
        actual, expected = quant_cache(model, quant), dynamic_cache(model)
        forward(model, ids, actual)
        forward(model, ids, expected)
        actual.crop(-remove)
        expected.crop(-remove)
        for token in more.split(1, dim=1):
            assert_close(forward(model, token, actual), forward(model, token, expected))


def test_a05_an_emptied_cache_is_like_new(model):
    ids = random_ids(2, 80, seed=2)
    used, fresh = quant_cache(model), quant_cache(model)
    forward(model, random_ids(2, 100), used)
    used.crop(-100)
    assert_close(forward(model, ids, used), forward(model, ids, fresh), 0.0)
    assert_same_content(used, fresh)


def test_a05_crop_of_a_copy_does_not_touch_the_original(model):
    cache = quant_cache(model)
    forward(model, random_ids(2, 100), cache)
    twin = copy.deepcopy(cache)
    twin.crop(-50)
    forward(model, random_ids(2, 50, seed=7), twin)
    fresh = quant_cache(model)
    forward(model, random_ids(2, 100), fresh)
    assert_same_content(cache, fresh)
