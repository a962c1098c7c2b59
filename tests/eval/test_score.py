"""Scoring through the cache: equal to one forward pass where the cache is exact, and the metrics by definition."""

import math

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import DynamicCache

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.eval import Protocol, score_windows
from kvquant_hf.eval.score import predictions

PROTOCOLS = [Protocol(61, 16, 15), Protocol(61, 1, 7), Protocol(61, 60, 64), Protocol(61, 16, 1), Protocol(61, 31, 64)]


def windows(count: int = 2, context: int = 61) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (count, context), generator=torch.Generator().manual_seed(1))


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
    # Nothing is exact but the tokens of the current call, so that the scores differ visibly.
    coarse = KVQuantConfig.from_preset("k2v2").replace(residual_length=0, sink_length=0)
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
