"""Case A17: evaluation runs that really exercise the cache, with a fresh cache for each call."""

import warnings

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

import kvquant_hf.eval.lm as lm_module
from kvquant_hf.eval.lm import KVQuantLM

SETTINGS = {
    "key": {"nbits": 4, "group_size": 16},
    "value": {"nbits": 4, "group_size": 16},
    "residual_length": 16,
    "sink_length": 4,
}


def characters_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<unk>", "</s>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


@pytest.fixture
def evaluator():
    def make(batch_size: int = 1, quant=SETTINGS) -> KVQuantLM:
        return KVQuantLM(
            tiny_model("llama"), quant, tokenizer=characters_tokenizer(), batch_size=batch_size, max_length=256
        )

    return make


def prompt(length: int, seed: int) -> str:
    codes = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(chr, codes.tolist()))


def generation(*lengths: int) -> list[Instance]:
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    return [Instance("generate_until", {}, (prompt(n, seed=n), dict(settings)), i) for i, n in enumerate(lengths)]


@pytest.fixture
def built(monkeypatch):
    caches = []
    real = lm_module.QuantCache

    def counted(*args):
        caches.append(real(*args))
        return caches[-1]

    monkeypatch.setattr(lm_module, "QuantCache", counted)
    return caches


@pytest.mark.parametrize(("batch_size", "calls"), [(1, 3), (2, 2)])
def test_a_fresh_cache_for_every_generate_call(evaluator, built, batch_size, calls):
    lm = evaluator(batch_size)
    answers = lm.generate_until(generation(30, 90, 60), disable_tqdm=True)
    assert len(answers) == 3
    assert len(built) == len(lm.calls) == calls
    assert len({id(cache) for cache in built}) == calls
    assert lm.quantized_tokens > 0


def test_an_answer_does_not_depend_on_what_ran_before(evaluator):
    together = evaluator().generate_until(generation(30, 90, 60), disable_tqdm=True)
    for i, length in enumerate((30, 90, 60)):
        assert evaluator().generate_until(generation(length), disable_tqdm=True) == [together[i]]


def test_the_record_tells_settings_and_quantized_tokens(evaluator):
    lm = evaluator()
    lm.generate_until(generation(90), disable_tqdm=True)
    info = lm.get_model_info()
    assert info["kvquant"] == lm.quant_config.to_dict()
    assert info["kvquant"]["key"]["nbits"] == 4
    stats = info["kvquant_stats"]
    assert stats["quantized_tokens"] == lm.calls[0].report.quantized_tokens > 0
    assert stats["generate_calls"] == 1
    assert 0 < stats["bits_per_value"] < 32
    assert stats["new_tokens_per_s"] > 0


def test_runs_that_quantize_nothing_warn(evaluator):
    with pytest.warns(UserWarning, match="No token was quantized"):
        evaluator(quant="k4v4").generate_until(generation(30), disable_tqdm=True)


def test_multiple_choice_warns_and_dense_settings_do_not(evaluator):
    requests = [Instance("loglikelihood", {}, (prompt(20, 0), " a"), 0)]
    with pytest.warns(UserWarning, match="never reads a cache"):
        quantized = evaluator().loglikelihood(requests, disable_tqdm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dense = evaluator(quant="dense").loglikelihood(requests, disable_tqdm=True)
    assert quantized == dense


def test_lm_eval_knows_the_model():
    assert get_model("kvquant") is KVQuantLM
