"""A17: evaluations exercise the cache: a fresh one for each run, results independent of order, codes really read.

The lm-eval model has tests of its own (`tests/eval/test_lm.py`), which need the `eval` extra; this is the scoring core
that works without it.
"""

import pytest
import torch
from harness import CACHE_KW, Q, dynamic_cache, kl, quant_cache, random_ids, scored_chunk, settings
from tiny_models import tiny_model

from kvquant_hf.eval import Protocol, held_bits, score_windows

PROTOCOL = Protocol(context=140, prefill=60, step=20)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def counting(model, quant, built):
    """A cache factory that keeps what it made."""

    def make():
        built.append(quant_cache(model, quant))
        return built[-1]

    return make


def test_a17_a_fresh_cache_for_every_window_and_setting(model):
    built = {"K4V4": [], "K2V2": []}
    factories = {"K4V4": counting(model, Q, built["K4V4"]), "K2V2": counting(model, settings(2, 2), built["K2V2"])}
    scores = score_windows(model, random_ids(3, 140), factories, PROTOCOL)
    for name, caches in built.items():
        assert len(caches) == 3 and len({id(cache) for cache in caches}) == 3
        for cache in caches:
            assert cache.get_seq_length() == 140
            assert cache.quantized_length(0) > 60
            assert held_bits(cache).bits_per_value_quantized is not None
        assert scores[name].tokens == 3 * 80
    assert 0 < scores["K4V4"].kl < scores["K2V2"].kl


def test_a17_a_window_scores_the_same_whatever_ran_before(model):
    windows = random_ids(3, 140)
    factories = {"K4V4": lambda: quant_cache(model, Q)}
    alone = [score_windows(model, window[None], factories, PROTOCOL)["K4V4"] for window in windows]
    together = score_windows(model, windows, factories, PROTOCOL)["K4V4"]
    backwards = score_windows(model, windows.flip(0), factories, PROTOCOL)["K4V4"]
    assert abs(sum(score.kl for score in alone) / 3 - together.kl) < 1e-6
    assert abs(together.kl - backwards.kl) < 1e-6


def test_a17_the_score_is_that_of_a_cache_that_is_read(model):
    """KL of the core equals KL measured here; one prefill of the whole window would give zero."""
    window = random_ids(1, 140)
    score = score_windows(model, window, {"K2V2": lambda: quant_cache(model, settings(2, 2))}, PROTOCOL)["K2V2"]
    expected = scored_chunk(model, dynamic_cache(model), window, 60, 20)[:, :-1]
    actual = scored_chunk(model, quant_cache(model, settings(2, 2)), window, 60, 20)[:, :-1]
    # The first scored token is predicted by the exact prefill.
    assert abs(score.kl - kl(expected, actual) * 79 / 80) < 1e-3 * score.kl
    one_prefill = score_windows(
        model, window, {"K2V2": lambda: quant_cache(model, settings(2, 2))}, Protocol(140, 139, 1)
    )["K2V2"]
    assert one_prefill.kl == 0 < score.kl


def test_a17_nothing_quantized_is_visible(model):
    """A window that fits into sinks and residual reads no codes, and the result says so."""
    built = []
    score = score_windows(
        model, random_ids(1, 140), {"idle": counting(model, settings(residual=4096), built)}, PROTOCOL
    )["idle"]
    assert score.kl < 1e-9
    assert held_bits(built[0]).bits_per_value_quantized is None
    assert built[0].memory_report().quantized_tokens == 0


def test_a17_generate_calls_are_independent():
    """Three requests of 30, 90 and 60 tokens: each with its own cache, as when run alone."""
    model = tiny_model("llama")
    prompts = [random_ids(1, length, seed=length) for length in (30, 90, 60)]

    def answer(ids):
        cache = quant_cache(model)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **{CACHE_KW: cache}
        )
        return out, cache.memory_report().quantized_tokens

    together = [answer(ids) for ids in prompts]
    alone = [answer(ids) for ids in reversed(prompts)][::-1]
    for (first, coded), (second, _) in zip(together, alone, strict=True):
        assert torch.equal(first, second)
        assert coded >= 16
