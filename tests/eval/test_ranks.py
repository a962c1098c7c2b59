"""Requests shared between processes: two threads stand for them here, two real ones come in `test_processes.py`."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from eval_tools import SETTINGS, TEXT, assert_same_answers, requests_of

from kvquant_hf.eval.lm import KVQuantLM
from kvquant_hf.eval.ranks import Ranks, generation_batches, groups_of_context


@dataclass
class Meeting:
    """What two threads exchange."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60))
    values: dict[int, bytes] = field(default_factory=dict)


class Threads(Ranks):
    """`Ranks` whose group is a `Meeting`."""

    def gather(self, value: Any) -> list[Any]:
        self.group.values[self.rank] = pickle.dumps(value)
        self.group.barrier.wait()
        found = [pickle.loads(self.group.values[rank]) for rank in range(self.size)]
        self.group.barrier.wait()
        return found

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def together(models: list[KVQuantLM], kind: str, journal=None) -> list[list[Any]]:
    """Answers of each of two models that take each other for processes of one run."""
    meeting = Meeting()

    def run(rank: int) -> list[Any]:
        try:
            models[rank].ranks = Threads(rank, 2, group=meeting)
            if journal is not None:
                models[rank].use(SETTINGS, journal)
            return getattr(models[rank], kind)(requests_of(kind), disable_tqdm=True)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(2)]]


MODES = [
    ("generate_until", "decode"),
    ("loglikelihood", "decode"),
    ("loglikelihood", "chunked"),
    ("loglikelihood_rolling", "decode"),
    ("loglikelihood_rolling", "chunked"),
]


@pytest.mark.filterwarnings("ignore:.*batches held prompts of different lengths")
@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_two_processes_give_the_answers_of_one(evaluator, monkeypatch, kind, mode):
    alone = evaluator(2, loglikelihood_mode=mode)
    expected = getattr(alone, kind)(requests_of(kind), disable_tqdm=True)
    models = [evaluator(2, loglikelihood_mode=mode) for _ in range(2)]
    own: dict[int, int] = {id(lm): 0 for lm in models}
    record = KVQuantLM._record
    monkeypatch.setattr(
        KVQuantLM, "_record", lambda lm, *args: (own.update({id(lm): own[id(lm)] + 1}), record(lm, *args))[1]
    )
    for answers, lm in zip(together(models, kind), models, strict=True):
        assert_same_answers(answers, expected)
        assert 0 < own[id(lm)] < len(lm.calls) == sum(own.values())
        assert lm.quantized_tokens > 0
        if kind == "generate_until" or (kind, mode) == ("loglikelihood", "decode"):  # nothing else pads to the left
            held = sorted(str(call.report) for call in alone.calls)
            assert sorted(str(call.report) for call in lm.calls) == held


@pytest.mark.filterwarnings("ignore:.*batches held prompts of different lengths")
@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_an_interrupted_run_goes_on_with_any_number_of_processes(evaluator, tmp_path, monkeypatch, kind):
    alone = evaluator(2)
    expected = getattr(alone, kind)(requests_of(kind), disable_tqdm=True)
    assert_same_answers(together([evaluator(2), evaluator(2)], kind, tmp_path)[0], expected)
    files = [tmp_path / f"responses-{rank}.jsonl" for rank in range(2)]
    lines = [file.read_text().splitlines(keepends=True) for file in files]
    assert all(lines) and sum(map(len, lines)) == len(alone.calls)

    files[0].write_text("".join(lines[0][1:]) + lines[0][0][:40])  # one batch lost, one cut off
    files[1].write_text("".join(lines[1][:-1]) + lines[1][-1][:40])
    models = [evaluator(2), evaluator(2)]
    for answers, lm in zip(together(models, kind, tmp_path), models, strict=True):
        assert_same_answers(answers, expected)
        assert sorted(str(call.report) for call in lm.calls) == sorted(str(call.report) for call in alone.calls)

    last = evaluator(2)
    last.use(SETTINGS, tmp_path)
    monkeypatch.setattr(last, "_model_generate", None)  # nothing is left to run
    monkeypatch.setattr(last, "_decode_batch", None)
    assert_same_answers(getattr(last, kind)(requests_of(kind), disable_tqdm=True), expected)
    assert len(last.calls) == len(alone.calls)


def test_of_some_batches_the_same_batches_are_formed_again():
    settings = [{"max_gen_toks": 8}, {"max_gen_toks": 9}]
    requests = [(TEXT[:n], settings[n % 3 == 0]) for n in range(1, 24)]
    batches = generation_batches(requests, 4, list)
    assert sorted(i for batch in batches for i in batch) == list(range(len(requests)))
    for rank in range(3):
        mine = Ranks(rank, 3).mine(batches)
        places = [i for batch in mine for i in batch]
        again = generation_batches([requests[i] for i in places], 4, list)
        assert sorted(sorted(places[i] for i in batch) for batch in again) == sorted(map(sorted, mine))


def test_equal_contexts_stay_together():
    assert groups_of_context(["ab", "abcd", "ab", "abc"]) == [[1], [3], [0, 2]]


def test_who_does_what():
    assert Ranks().mine([1, 2, 3]) == Ranks(1, 2, split_model=True).mine([1, 2, 3]) == [1, 2, 3]
    assert [Ranks(rank, 2).mine([1, 2, 3]) for rank in (0, 1)] == [[1, 3], [2]]
    assert Ranks.current() == Ranks()  # no processes were started


def test_arguments_that_several_processes_or_devices_cannot_have(evaluator, lm_model_dir, monkeypatch):
    with pytest.raises(ValueError, match="`device_map` needs `parallelize=True`"):
        KVQuantLM(str(lm_model_dir), device_map="auto", device="cpu")
    monkeypatch.setattr(Ranks, "current", classmethod(lambda cls, split_model: cls(0, 2)))
    with pytest.raises(ValueError, match="`batch_size` must be a number where several processes run, got 'auto'"):
        evaluator("auto")
