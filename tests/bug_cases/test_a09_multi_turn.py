"""A9: the length is right after every operation, over several turns on one context."""

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_lengths,
    dynamic_cache,
    each_lossless,
    forward,
    kl,
    quant_cache,
    random_ids,
    settings,
)
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


# From 70 tokens, 12 more do not complete a block; from 78 they do, and the crop reaches back over it.
@pytest.mark.parametrize("context", [70, 78], ids=["no-flush", "flush-inside-the-turn"])
@pytest.mark.parametrize("one_by_one", [False, True], ids=["chunk", "steps"])
@pytest.mark.parametrize(
    "quant",
    [Q, settings(residual=0), settings(residual=4096), settings(16, 16)],
    ids=["K4V4", "K4V4-no-residual", "residual", "16-bit"],
)
def test_a09_length_after_each_turn(model, quant, context, one_by_one):
    cache = quant_cache(model, quant)
    assert_lengths(cache, 0)
    forward(model, random_ids(1, context), cache)
    assert_lengths(cache, context)
    for turn in range(3):
        ids = random_ids(1, 12, seed=turn + 1)
        for index, chunk in enumerate(ids.split(1, dim=1) if one_by_one else [ids]):
            forward(model, chunk, cache)
            assert_lengths(cache, context + (index + 1 if one_by_one else 12))
        cache.crop(-12)
        assert_lengths(cache, context)


@each_lossless
def test_a09_lossless_question_after_three_turns(model, lossless):
    ids, question = random_ids(1, 70), random_ids(1, 3, seed=9)
    cache, fresh = quant_cache(model, lossless), dynamic_cache(model)
    forward(model, ids, cache)
    for turn in range(3):
        forward(model, random_ids(1, 12, seed=turn + 1), cache)
        cache.crop(-12)
    forward(model, ids, fresh)
    assert_close(forward(model, question, cache), forward(model, question, fresh))


@pytest.mark.parametrize("context", [70, 78])
def test_a09_turns_cost_no_quality(model, context):
    used_kl = fresh_kl = 0.0
    for seed in range(6):
        ids, question = random_ids(1, context, seed), random_ids(1, 3, seed=seed + 70)
        reference, used, fresh = dynamic_cache(model), quant_cache(model), quant_cache(model)
        for cache in (reference, used, fresh):
            forward(model, ids, cache)
        for turn in range(3):
            forward(model, random_ids(1, 12, seed=100 * seed + turn), used)
            used.crop(-12)
        expected = forward(model, question, reference)
        actual = forward(model, question, used)
        assert torch.isfinite(actual).all()
        used_kl += kl(expected, actual)
        fresh_kl += kl(expected, forward(model, question, fresh))
    assert used_kl <= 2.0 * fresh_kl


@each_lossless
def test_a09_generate_turn_by_turn_equals_dynamic_cache(model, lossless):
    """Three questions through `generate` on one context; each answer is cropped away."""

    def conversation(cache):
        context, answers = random_ids(1, 70), []
        forward(model, context, cache)
        for turn in range(3):
            prompt = torch.cat([context, random_ids(1, 5, seed=turn + 1)], dim=1)
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False,
                **{CACHE_KW: cache},
            )  # fmt: skip
            answers.append(out[:, prompt.shape[1] :])
            assert cache.get_seq_length() == 70 + 5 + 19
            cache.crop(70 - cache.get_seq_length())
            assert cache.get_seq_length() == 70
        return torch.cat(answers)

    assert torch.equal(conversation(quant_cache(model, lossless)), conversation(dynamic_cache(model)))
