"""Case A17: generation runs that really exercise the cache, with a fresh cache for each call."""

import warnings

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from eval_tools import SETTINGS
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

import kvquant_hf.eval.lm as lm_module
from kvquant_hf.eval.lm import KVQuantLM


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


def test_plain_loglikelihood_warns_and_dense_settings_do_not(evaluator):
    requests = [Instance("loglikelihood", {}, (prompt(60, 0), " a"), 0)]
    with pytest.warns(UserWarning, match="never reads a cache"):
        quantized = evaluator(loglikelihood_mode="plain").loglikelihood(requests, disable_tqdm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dense = evaluator(quant="dense", loglikelihood_mode="plain").loglikelihood(requests, disable_tqdm=True)
    assert quantized == dense


def test_lm_eval_knows_the_model():
    assert get_model("kvquant") is KVQuantLM


def test_batches_of_unequal_prompts_warn(evaluator):
    with pytest.warns(UserWarning, match=r"1 of 2 batches held prompts of different lengths \(up to 30 padding"):
        lm = evaluator(2)
        lm.generate_until(generation(30, 90, 60), disable_tqdm=True)
    assert [call.padding for call in lm.calls] == [(0, 30), (0,)]
    assert "different lengths" in lm.get_model_info()["kvquant_cautions"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        evaluator(2).generate_until(generation(60, 60), disable_tqdm=True)
        evaluator(2, quant="dense").generate_until(generation(60, 90), disable_tqdm=True)


def test_an_interrupted_run_goes_on(evaluator, tmp_path, monkeypatch):
    requests = generation(30, 90, 60, 45, 30)
    whole = evaluator(2)
    expected = whole.generate_until(requests, disable_tqdm=True)

    first = evaluator(2)
    first.use(SETTINGS, tmp_path)
    real, batches = KVQuantLM._model_generate, []

    def killed_in_the_third(self, *args, **kwargs):
        batches.append(args)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(KVQuantLM, "_model_generate", killed_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        first.generate_until(requests, disable_tqdm=True)
    monkeypatch.undo()
    with (tmp_path / "responses-0.jsonl").open("a") as file:
        file.write('{"responses": [["cut')  # the machine went down within a line

    second = evaluator(2)
    second.use(SETTINGS, tmp_path)
    assert second.generate_until(requests, disable_tqdm=True) == expected
    assert len(second.calls) == len(whole.calls) == 3
    assert [call.report for call in second.calls] == [call.report for call in whole.calls]

    third = evaluator(2)
    third.use(SETTINGS, tmp_path)
    monkeypatch.setattr(third, "_model_generate", None)  # nothing is left to run
    assert third.generate_until(requests, disable_tqdm=True) == expected
    assert third.get_model_info()["kvquant_stats"] == second.get_model_info()["kvquant_stats"]


def test_settings_are_checked(evaluator):
    with pytest.raises(
        ValueError, match=r"`loglikelihood_mode` must be one of .* got 'decoded'\. Did you mean 'decode'"
    ):
        evaluator(loglikelihood_mode="decoded")
    with pytest.raises(ValueError, match="`loglikelihood_chunk` must be an integer >= 1, got 0"):
        evaluator(loglikelihood_chunk=0)
    with pytest.raises(FileNotFoundError, match=r"get_model.py nothing"):
        KVQuantLM("prepared:nothing")
