"""A11: Phi-3 drops the user's cache at the LongRoPE switch; quantization must not end silently."""

import logging
import warnings

import pytest
import torch
from harness import CACHE_KW, LOSSLESS, assert_close, dynamic_cache, each_lossless, quant_cache, random_ids, roll
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    model = tiny_model("phi3-longrope")
    assert model.config.original_max_position_embeddings == 48
    return model


def crossing(model, quant, caplog):
    """Generate 30 tokens after 40 (the switch is at 48) with our cache; the output and every message issued."""
    ids = random_ids(1, 40)
    cache = quant_cache(model, quant)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
            return_dict_in_generate=True, **{CACHE_KW: cache},
        )  # fmt: skip
    return out, [str(item.message) for item in caught] + [record.getMessage() for record in caplog.records]


@each_lossless
def test_a11_lossless_ids_equal_plain_generate(model, lossless, caplog):
    ids = random_ids(1, 40)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    out, _ = crossing(model, lossless, caplog)
    assert torch.equal(out.sequences, expected)


def test_a11_the_crossing_keeps_quantization_or_says_so(model, caplog):
    from kvquant_hf import QuantCache

    out, messages = crossing(model, "k4v4", caplog)
    returned = getattr(out, CACHE_KW)
    if isinstance(returned, QuantCache):
        assert returned.get_seq_length() == 69
        return
    said = [text for text in messages if "rope" in text.lower() and "48" in text]
    assert said, f"the cache was dropped and nothing was said: {messages}"


def test_a11_no_message_without_a_crossing(model, caplog):
    """Below the switch the user's own cache is returned and nothing is said."""
    ids = random_ids(1, 10)
    cache = quant_cache(model, LOSSLESS["16-bit"])
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
            return_dict_in_generate=True, **{CACHE_KW: cache},
        )  # fmt: skip
    assert getattr(out, CACHE_KW) is cache
    texts = [str(item.message) for item in caught] + [record.getMessage() for record in caplog.records]
    assert not [text for text in texts if "rope" in text.lower()]


@pytest.mark.parametrize("prompt", [30, 60], ids=["short-factors", "long-factors"])
@each_lossless
def test_a11_forward_on_either_side_equals_dynamic_cache(model, prompt, lossless):
    ids, steps = random_ids(2, prompt), random_ids(2, 10, seed=1)
    expected = roll(model, dynamic_cache(model), ids, steps)
    assert_close(roll(model, quant_cache(model, lossless), ids, steps), expected)
