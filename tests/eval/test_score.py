"""Scoring through the cache: equal to one forward pass where the cache is exact, and the metrics by definition."""

import math
from itertools import pairwise

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import DynamicCache

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.eval import HeldBits, Protocol, score_windows
from kvquant_hf.eval.divergence import Divergence, first_divergence, greedy_text, summarize_divergence
from kvquant_hf.eval.plots import pareto_front
from kvquant_hf.eval.score import ChunkScore, Score, predictions
from kvquant_hf.eval.score_report import ModelScores, table
from kvquant_hf.eval.score_store import FileStore

PROTOCOLS = [Protocol(61, 16, 15), Protocol(61, 1, 7), Protocol(61, 60, 64), Protocol(61, 16, 1), Protocol(61, 31, 64)]


def windows(count: int = 2, context: int = 61) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (count, context), generator=torch.Generator().manual_seed(1))


def everything_coarse() -> KVQuantConfig:
    """Two bits from the first block of 16 tokens on, so that scores of short windows differ visibly."""
    exact = {"residual_length": 0, "sink_length": 0}
    return KVQuantConfig.from_preset("k2v2").replace(key={"group_size": 16}, **exact)


def whole_forward(model, window, protocol):
    with torch.no_grad():
        logits = model(input_ids=window[None]).logits[0].float()
    return logits.log_softmax(-1)[protocol.prefill - 1 : -1]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: f"{p.prefill}+{p.step}")
def test_pieces_give_the_predictions_of_one_forward(protocol):
    model = tiny_model("llama")
    window = windows()[0]
    cache = DynamicCache(config=model.config)
    pieces = list(predictions(model, window, cache, protocol))
    torch.testing.assert_close(torch.cat(pieces), whole_forward(model, window, protocol), rtol=0, atol=1e-4)
    assert cache.get_seq_length() == protocol.context
    assert all(end - first <= protocol.step for first, end in protocol.pieces()[1:])


def test_scores_follow_their_definitions():
    model = tiny_model("llama")
    protocol = Protocol(61, 16, 15)
    coarse = everything_coarse()
    make = {"coarse": lambda: QuantCache(model, coarse), "again": lambda: DynamicCache(config=model.config)}
    scores = score_windows(model, windows(), make, protocol)

    reference = torch.cat([whole_forward(model, window, protocol) for window in windows()]).double()
    targets = windows()[:, protocol.prefill :].flatten()
    tested = [torch.cat(list(predictions(model, window, make["coarse"](), protocol))) for window in windows()]
    log_probs = torch.cat(tested).double()

    nll = -log_probs[range(len(targets)), targets]
    assert scores["coarse"].perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    divergence = (reference.exp() * (reference - log_probs)).sum(-1).mean().item()
    assert scores["coarse"].kl == pytest.approx(divergence, rel=1e-3) and divergence > 0.01
    agreement = (reference.argmax(-1) == log_probs.argmax(-1)).double().mean().item()
    assert scores["coarse"].top1 == pytest.approx(agreement) and agreement < 1
    assert scores["coarse"].tokens == 2 * protocol.scored == len(targets)
    assert scores["again"] == scores["DynamicCache"]
    assert scores["DynamicCache"].kl == 0 and scores["DynamicCache"].top1 == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_shared_prefill_gives_the_same_scores(family, monkeypatch):
    model = tiny_model(family)
    protocol = Protocol(61, 24, 15)
    coarse = everything_coarse()
    make = {"coarse": lambda: QuantCache(model, coarse), "dense": lambda: DynamicCache(config=model.config)}
    plain = score_windows(model, windows(), make, protocol)
    fed = []
    real = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, **given: fed.append(given["input_ids"].shape[1]) or real(self, **given)
    )
    assert score_windows(model, windows(), make, protocol, share_prefill=True) == plain
    assert fed.count(24) == 2 and fed.count(15) == 2 * 3 * 2  # one prefill a window, all steps for every cache
    assert plain["coarse"].kl > 0.001


def test_caches_that_ask_queries_run_the_prefill_themselves():
    """A recorded prefill has none, and without them the guard would decide otherwise."""
    model, protocol = tiny_model("llama"), Protocol(61, 40, 21)
    coarse = everything_coarse()
    quant = coarse.replace(key={"nbits": 2}, residual_length=4, attention_guard=0.0)
    make = {"guarded": lambda: QuantCache(model, quant), "coarse": lambda: QuantCache(model, coarse)}
    plain = score_windows(model, windows(), make, protocol)
    assert score_windows(model, windows(), make, protocol, share_prefill=True) == plain
    unguarded = {"guarded": lambda: QuantCache(model, quant.without_guards())}
    assert score_windows(model, windows(), unguarded, protocol)["guarded"].kl != plain["guarded"].kl


def test_progress_counts_every_scored_token():
    model = tiny_model("llama")
    seen: dict[str, int] = {}
    make = {"dense": lambda: DynamicCache(config=model.config)}
    protocol = Protocol(61, 16, 64)
    score_windows(model, windows(), make, protocol, lambda name, n: seen.update({name: seen.get(name, 0) + n}))
    assert seen == {"DynamicCache": 2 * protocol.scored, "dense": 2 * protocol.scored}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((64, 64, 8), "`prefill` must be less than"), ((64, 0, 8), "`prefill` must be"), ((64, 8, 0), "`step` must be")],
)
def test_protocol_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Protocol(*arguments)


def test_score_windows_refuses():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"shape \[N, 61\].*got \[2, 60\]"):
        score_windows(model, windows(context=60), {}, Protocol(61, 16, 15))
    with pytest.raises(ValueError, match="must not use the name"):
        score_windows(model, windows(), {"DynamicCache": lambda: DynamicCache()}, Protocol(61, 16, 15))


# ---- windows one by one ----------------------------------------------------------------------------------------

COARSE = KVQuantConfig.from_preset("k2v2").replace(residual_length=0, sink_length=0)


@pytest.mark.parametrize("protocol", [Protocol(61, 16, 15), Protocol(200, 1, 7), Protocol(40, 39, 1)])
def test_bins_cover_the_scored_positions(protocol):
    bins = protocol.bins()
    assert bins[0][0] == protocol.prefill and bins[-1][1] == protocol.context and len(bins) <= 32
    assert all(first[1] == second[0] for first, second in pairwise(bins))
    widths = [end - first for first, end in bins]
    assert min(widths) >= 1 and max(widths) - min(widths) <= 1


def test_curves_are_means_by_position():
    model = tiny_model("llama")
    protocol = Protocol(61, 16, 15)
    score = score_windows(model, windows(3), {"coarse": lambda: QuantCache(model, COARSE)}, protocol)["coarse"]
    kl = []
    for window in windows(3):
        reference = torch.cat(list(predictions(model, window, DynamicCache(config=model.config), protocol))).double()
        tested = torch.cat(list(predictions(model, window, QuantCache(model, COARSE), protocol))).double()
        kl.append((reference.exp() * (reference - tested)).sum(-1))
    for (first, end), value in zip(protocol.bins(), score.curve("kl"), strict=True):
        expected = torch.stack(kl)[:, first - 16 : end - 16].mean().item()
        assert value == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert len(score.chunks) == 3 and sum(score.chunks[0].tokens) == protocol.scored
    assert score.kl == pytest.approx(sum(sum(chunk.kl) for chunk in score.chunks) / score.tokens)


def chunk(nll, kl, agreed, tokens=10):
    return ChunkScore((nll,), (kl,), (agreed,), (tokens,))


def test_intervals_are_over_chunks_and_the_ratio_is_paired():
    bits = HeldBits(16.0, None, 1)
    dense = Score.of([chunk(10.0 * i, 0.0, 10) for i in range(1, 9)])
    # Texts differ a lot, but every chunk loses the same: the paired interval is a point.
    tested = Score.of([chunk(10.0 * i + 1, 0.5, 9) for i in range(1, 9)])
    measured = ModelScores("m", {"DynamicCache": dense, "x": tested}, {"DynamicCache": bits, "x": bits})
    intervals = measured.intervals("x")
    assert intervals["ratio"] == pytest.approx((math.exp(0.1), math.exp(0.1)))
    assert intervals["kl"] == pytest.approx((0.05, 0.05)) and intervals["top1"] == pytest.approx((0.9, 0.9))
    row = measured.rows()[1]
    assert row["ratio"] == pytest.approx(math.exp(0.1)) and row["first_divergence"] is None
    one = ModelScores("m", {"DynamicCache": Score.of(dense.chunks[:1])}, {"DynamicCache": bits})
    assert one.intervals("DynamicCache") == {"kl": None, "top1": None, "ratio": None}
    assert "DynamicCache" in table(one)


def test_an_interrupted_run_goes_on(tmp_path):
    model = tiny_model("llama")
    protocol = Protocol(61, 16, 15)
    built = []

    def coarse():
        built.append(QuantCache(model, COARSE))
        if len(built) == 3:
            raise KeyboardInterrupt
        return built[-1]

    make = {"fine": lambda: QuantCache(model, "k8v8"), "coarse": coarse}
    expected = score_windows(model, windows(4), make | {"coarse": lambda: QuantCache(model, COARSE)}, protocol)
    configs = {"coarse": COARSE.to_dict(), "fine": {}}
    path = tmp_path / "new" / "chunks.jsonl"
    with pytest.raises(KeyboardInterrupt):
        score_windows(model, windows(4), make, protocol, store=FileStore(path, {"model": 1}, configs))
    assert len(built) == 3 and len(path.read_text().splitlines()) == 3 * 3 - 1
    with path.open("a") as file:
        file.write('{"key": "cut')
    told = {}
    progress = lambda name, n: told.update({name: told.get(name, 0) + n})  # noqa: E731 - a counter
    store = FileStore(path, {"model": 1}, configs)
    assert score_windows(model, windows(4), make, protocol, progress, store) == expected
    assert len(built) == 5 and set(told.values()) == {4 * protocol.scored}
    assert score_windows(model, windows(4), make, protocol, store=FileStore(path, {"model": 1}, configs)) == expected
    assert len(built) == 5
    for other in (FileStore(path, {"model": 2}, configs), FileStore(path, {"model": 1}, {"coarse": {"nbits": 9}})):
        assert other.get("coarse", windows(4)[0]) is None
    assert store.get("coarse", windows(4)[0]) is not None


def test_exceptions_by_layer_are_told_apart_by_their_order(tmp_path):
    # A range and a number cannot be sorted, and later entries win.
    eight, two = {"key": {"nbits": 8}}, {"key": {"nbits": 2}}
    one = {"layers": {"0-1": eight, 1: two}}
    window, score = windows()[0], ChunkScore((1.0,), (0.5,), (1,), (1,))
    FileStore(tmp_path / "store", {}, {"one": one}).put("one", window, score)
    store = FileStore(tmp_path / "store", {}, {"one": one, "other": {"layers": {1: two, "0-1": eight}}})
    assert store.get("one", window) == score and store.get("other", window) is None


def test_first_divergence_is_that_of_generate():
    model = tiny_model("llama")
    found = []
    for prompt in windows(4, 50):
        text = greedy_text(model, prompt, 24)
        dense = model.generate(prompt[None], max_new_tokens=24, do_sample=False)[0, 50:]
        assert torch.equal(text, dense)
        config = KVQuantConfig.from_preset("k3v3").replace(key={"group_size": 16}, residual_length=16)
        cache = QuantCache(model, config)
        quantized = model.generate(prompt[None], max_new_tokens=24, do_sample=False, **cache_kwargs(cache))[0, 50:]
        differ = (quantized != dense).nonzero()
        expected = int(differ[0]) if len(differ) else 24
        assert first_divergence(model, prompt, text, QuantCache(model, config)) == expected
        found.append(expected)
        assert first_divergence(model, prompt, text, DynamicCache(config=model.config)) == 24
    assert min(found) < 24
    other = torch.cat([(text[:1] + 1) % VOCAB_SIZE, text[1:]])
    assert first_divergence(model, prompt, other, DynamicCache(config=model.config)) == 0
    assert summarize_divergence([3, 24, 24], 24) == {"tokens": 24, "first": [3, 24, 24], "median": 24.0, "never": 2}
    assert Divergence(8, (1, 2)).median == 1.5


def test_pareto_front():
    points = [(5.0, 0.2), (3.0, 0.5), (4.0, 0.6), (9.0, 0.1), (9.0, 0.3), (16.0, 0.1)]
    assert pareto_front(points) == [(3.0, 0.5), (5.0, 0.2), (9.0, 0.1)]
