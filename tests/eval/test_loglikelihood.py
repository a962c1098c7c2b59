"""Log-likelihood read through the cache: equal to lm-eval's where the cache is exact, different where it is not."""

import pytest
import torch
from tiny_models import tiny_model

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from eval_tools import characters_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvquant_hf.eval.loglikelihood import batches_of, rows_of

CONTEXTS = {n: "".join(chr(97 + (i * i * 7 + i * n + n) % 26) for i in range(n)) for n in (1, 2, 30, 61, 90)}
PAIRS = [
    (CONTEXTS[90], "a"),
    (CONTEXTS[90], "b"),
    (CONTEXTS[90], "baba yaga"),
    (CONTEXTS[61], " of the"),
    (CONTEXTS[30], "x"),
    (CONTEXTS[2], "yz"),
    (CONTEXTS[1], "abc"),
]
MODES = [
    {"loglikelihood_mode": "decode"},
    {"loglikelihood_mode": "decode", "loglikelihood_step": 3},
    {"loglikelihood_mode": "chunked", "loglikelihood_chunk": 16},
    {"loglikelihood_mode": "chunked", "loglikelihood_chunk": 1},
    {"loglikelihood_mode": "plain"},
]


def requests(pairs=PAIRS, kind="loglikelihood"):
    return [Instance(kind, {}, pair if isinstance(pair, tuple) else (pair,), i) for i, pair in enumerate(pairs)]


def hflm(batch_size=1, family="llama", **more):
    more = {"tokenizer": characters_tokenizer(), "max_length": 256} | more
    return HFLM(pretrained=tiny_model(family), batch_size=batch_size, **more)


def assert_same(found, expected):
    for (value, greedy), (wanted, wanted_greedy) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, rel=1e-6, abs=1e-5) and greedy == wanted_greedy


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_a_dense_cache_gives_the_numbers_of_lm_eval(evaluator, mode, batch_size):
    expected = hflm().loglikelihood(requests(), disable_tqdm=True)
    assert len({value for value, _ in expected}) == len(PAIRS)
    lm = evaluator(batch_size, quant="dense", **mode)
    assert_same(lm.loglikelihood(requests(), disable_tqdm=True), expected)
    assert bool(lm.calls) == (mode["loglikelihood_mode"] != "plain")


def test_padding_shifts_no_position(evaluator):
    """GPT-2's learned positions, unlike rotary ones, show an offset that a whole row shares."""
    expected = hflm(family="gpt2").loglikelihood(requests(), disable_tqdm=True)
    assert_same(evaluator(3, quant="dense", family="gpt2").loglikelihood(requests(), disable_tqdm=True), expected)


def test_a_greedy_continuation_is_recognized(evaluator):
    model = tiny_model("llama")
    tokenizer = characters_tokenizer()
    ids = tokenizer(CONTEXTS[61], return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1:])
    found = evaluator(quant="dense").loglikelihood(requests([(CONTEXTS[61], text)]), disable_tqdm=True)
    assert found[0][1] is True


def test_too_long_contexts_lose_their_beginning_as_in_lm_eval(evaluator):
    pairs = [(CONTEXTS[90], "abcde"), (CONTEXTS[61], "f")]
    expected = hflm(max_length=40).loglikelihood(requests(pairs), disable_tqdm=True)
    found = evaluator(quant="dense", max_length=40).loglikelihood(requests(pairs), disable_tqdm=True)
    assert_same(found, expected)


@pytest.mark.parametrize("mode", MODES[:4], ids=lambda mode: "-".join(map(str, mode.values())))
def test_rolling_texts(evaluator, mode):
    texts = [CONTEXTS[90], CONTEXTS[61]]
    expected = hflm(max_length=50).loglikelihood_rolling(requests(texts, "loglikelihood_rolling"), disable_tqdm=True)
    lm = evaluator(2, quant="dense", max_length=50, **mode)
    found = lm.loglikelihood_rolling(requests(texts, "loglikelihood_rolling"), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*batches held prompts")
@pytest.mark.parametrize("mode", MODES[:4], ids=lambda mode: "-".join(map(str, mode.values())))
def test_a_coarse_cache_gives_other_numbers_even_for_single_tokens(evaluator, mode):
    coarse = {"key": {"nbits": 2}, "value": {"nbits": 2}, "residual_length": 0, "sink_length": 0}
    long = PAIRS[:4]
    expected = hflm().loglikelihood(requests(long), disable_tqdm=True)
    lm = evaluator(2, quant=coarse, **mode)
    found = lm.loglikelihood(requests(long), disable_tqdm=True)
    assert all(abs(value - wanted) > 1e-3 for (value, _), (wanted, _) in zip(found, expected, strict=True))
    assert lm.quantized_tokens > 0 and {call.kind for call in lm.calls} == {"loglikelihood"}


@pytest.mark.filterwarnings("ignore:.*batches held prompts")
def test_rows_of_a_batch_do_not_disturb_each_other(evaluator):
    """8-bit codes, whose error is small: what is left is the padding's, not another row's tokens."""
    fine = {"key": {"nbits": 8}, "value": {"nbits": 8}, "residual_length": 0}
    alone = evaluator(1, quant=fine).loglikelihood(requests(), disable_tqdm=True)
    together = evaluator(7, quant=fine).loglikelihood(requests(), disable_tqdm=True)
    for (value, _), (other, _) in zip(alone, together, strict=True):
        assert value == pytest.approx(other, abs=0.1)


def test_requests_that_differ_in_the_last_token_share_a_row():
    requested = [([5, 6, 7], [1]), ([5, 6, 7], [2]), ([5, 6, 7], [1, 3]), ([9], [4])]
    rows = rows_of(requested, 256)
    assert [(row.prefill, row.fed, row.targets) for row in rows] == [
        ((5, 6), (7, 1), {2: (1, 3)}),
        ((5, 6), (7,), {0: (1,), 1: (2,)}),
        ((), (9,), {3: (4,)}),
    ]
    assert [len(batch) for batch in batches_of(rows, 8)] == [2, 1]


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2, 3, 4, 5, 6])])
def test_empty_or_endless_requests_are_refused(pair):
    with pytest.raises(ValueError, match="continuations of 1 to 4 tokens"):
        rows_of([pair], 4)


@pytest.mark.parametrize("mode", ["decode", "chunked", "plain"])
def test_an_interrupted_run_goes_on(evaluator, tmp_path, monkeypatch, mode):
    arguments = {"batch_size": 2, "quant": "dense", "loglikelihood_mode": mode}
    expected = evaluator(**arguments).loglikelihood(requests(), disable_tqdm=True)
    lm = evaluator(**arguments)
    lm.use("dense", tmp_path)
    name = "_decode_batch" if mode == "decode" else "_model_call"
    real, batches = getattr(lm, name), []

    def killed_in_the_third(batch, *args):
        batches.append(batch)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return real(batch, *args)

    monkeypatch.setattr(lm, name, killed_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(requests(), disable_tqdm=True)
    assert (tmp_path / "responses-0.jsonl").read_text().count("\n") >= 1

    again = evaluator(**arguments)
    again.use("dense", tmp_path)
    ran = []
    real = getattr(again, name)
    monkeypatch.setattr(again, name, lambda batch, *args: ran.append(batch) or real(batch, *args))
    assert_same(again.loglikelihood(requests(), disable_tqdm=True), expected)
    assert 0 < len(ran) < 5
    again.use("dense", tmp_path)
    assert_same(again.loglikelihood(requests(), disable_tqdm=True), expected)
    assert torch.is_grad_enabled()
