"""A8: the stored state depends on the tokens, never on how calls cut them."""

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_same_content,
    feed,
    forward,
    left_pad,
    quant_cache,
    random_ids,
    random_states,
    settings,
    steady_model,
)
from tiny_models import tiny_model


def cuts_of(length):
    """Ways of cutting `length` tokens into calls."""
    return {
        "singles": [1] * length,
        "one-then-rest": [1, length - 1],
        "rest-then-one": [length - 1, 1],
        "uneven": [37, 1, length - 38],
        "twenties": [20] * (length // 20) + ([length % 20] if length % 20 else []),
        "threes": [3] * (length // 3) + ([length % 3] if length % 3 else []),
        "groups": [16] * (length // 16) + ([length % 16] if length % 16 else []),
    }


VARIANTS = {
    "K4V4": Q,
    "K2V3-mse": settings(2, 3, key={"clip": "mse"}, value={"clip": "mse"}),
    "no-window": settings(residual=0, sinks=0),
    "post-rope": settings(key={"rope": "post"}),
    "hadamard": settings(key={"rotation": "hadamard"}, value={"rotation": "hadamard"}),
    "per-channel-values": settings(value={"granularity": "per_channel"}),
    "per-token-keys": settings(key={"granularity": "per_token"}),
    "group-32-16": settings(key={"group_size": 32}),
    "K4V16": settings(4, 16),
    "K16V4": settings(16, 4),
}
# One below, at and one above sinks + residual + k x group.
LENGTHS = [100, *(4 + 16 + 16 * blocks + off for blocks in (1, 3) for off in (-1, 0, 1))]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("quant", list(VARIANTS.values()), ids=list(VARIANTS))
def test_a08_the_same_states_give_the_same_cache_bit_for_bit(quant, length):
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(2, 2, length, 16)
    expected = quant_cache(model, quant)
    feed(expected, keys, values)
    for name, cuts in cuts_of(length).items():
        if min(cuts) < 0:
            continue
        actual = quant_cache(model, quant)
        feed(actual, keys, values, [cut for cut in cuts if cut])
        assert actual.get_seq_length() == length, name
        assert_same_content(actual, expected)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a08_chunked_forwards_give_the_same_logits(length, attention):
    model = steady_model(attn_implementation=attention)
    ids, last = random_ids(2, length), random_ids(2, 1, seed=1)
    reference = quant_cache(model)
    forward(model, ids, reference)
    expected = forward(model, last, reference)
    for name, cuts in cuts_of(length).items():
        if min(cuts) < 0:
            continue
        cache = quant_cache(model)
        for chunk in ids.split([cut for cut in cuts if cut], dim=1):
            forward(model, chunk, cache)
        assert_close(forward(model, last, cache), expected, 1e-4, name)


def test_a08_chunks_of_a_padded_batch():
    """A chunk boundary inside the pads, on the last pad and inside a row's sinks."""
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(3, 2, 100, 16)
    _, mask = left_pad(torch.ones(3, 100, dtype=torch.long), (25, 7, 0))
    real = mask.bool()[:, None, :, None]
    caches = []
    for cuts in ([100], [10, 15, 2, 73], [25, 75], [1] * 100):
        cache = quant_cache(model)
        cache.set_padding(mask)
        feed(cache, keys, values, cuts)
        caches.append(cache)
    for cache in caches[1:]:
        assert cache.quantized_length(0) == caches[0].quantized_length(0)
        for mine, true in zip(cache.dequantize(0), caches[0].dequantize(0), strict=True):
            assert torch.equal(torch.where(real, mine, 0.0), torch.where(real, true, 0.0))


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 100])
def test_a08_prefill_chunk_size(chunk):
    """The stored states of the prompt are those of a prefill in one piece."""
    model = steady_model()
    ids = random_ids(2, 90)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    whole, chunked = quant_cache(model), quant_cache(model)
    model.generate(ids, **options, **{CACHE_KW: whole})
    model.generate(ids, **options, prefill_chunk_size=chunk, **{CACHE_KW: chunked})
    assert chunked.get_seq_length() == whole.get_seq_length() == 109
    for mine, true in zip(chunked.dequantize(0), whole.dequantize(0), strict=True):
        assert_close(mine[:, :, :90], true[:, :, :90], 1e-4, "prompt")
