"""The markdown report of a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvquant_hf.analysis.allocation import Problem
from kvquant_hf.analysis.calibration import ALLOCATION, TOLERANCE, Calibration, Round
from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.run import Device
from kvquant_hf.eval.environment import environment_line
from kvquant_hf.eval.score import REFERENCE, Protocol, Score
from kvquant_hf.eval.statistics import mean_interval

PRESET = "preset.yaml"


@dataclass(frozen=True)
class Source:
    """What was calibrated, and on what.

    Attributes:
        model: Name of the model.
        protocol: How windows were fed.
        queries: Queries whose attention was looked at.
        text: Facts of the text calibrated on, see `kvquant_hf.analysis.run.text_facts`.
        held_out: Facts of the other text, `None` where there is none.
        device: Where the model ran.
    """

    model: str
    protocol: Protocol
    queries: int
    text: Mapping[str, Any]
    held_out: Mapping[str, Any] | None
    device: Device


def score_figures(scores: Mapping[str, Score], name: str) -> dict[str, Any] | None:
    """Figures of one cache for JSON and tables, `None` where it was not scored."""
    if name not in scores:
        return None
    score = scores[name]
    return {
        "kl": score.kl,
        "kl_interval": mean_interval([sum(chunk.kl) / sum(chunk.tokens) for chunk in score.chunks]),
        "top1": score.top1,
        "perplexity": score.perplexity,
        "ratio": score.perplexity / scores[REFERENCE].perplexity,
        "tokens": score.tokens,
    }


def errors_by_candidate(problem: Problem, side: str) -> dict[str, list[float]]:
    """Single errors of all layers by candidate."""
    errors = problem.sensitivities.errors[side]
    return {name: [errors[index][name] for index in problem.sizes.layers] for name in problem.candidates.of(side)}


def markdown(found: Calibration, source: Source, environment: Mapping[str, Any]) -> list[str]:
    """Lines of `report.md`."""
    problem, answer = found.problem, found.answer
    budget = problem.budget
    verdict = "met" if answer.is_met else "**missed**"
    lines = ["# Budget of a quantized cache", "", "![sensitivity](sensitivity.png)", ""]
    lines += [
        f"Budget for {source.model}: {budget}. By what was measured it is {verdict}; settings in "
        f"[`{PRESET}`]({PRESET}). {_text_line(source)}",
        "",
        *_results(found),
        "",
        "![allocation](allocation.png)",
        "",
        "## Predictions and measurements",
        "",
        "The error of an allocation is predicted as the sum of the errors of its layers and sides alone"
        + (", here their mean over layers. " if budget.kind == "attention" else ". ")
        + f"A prediction that misses what is then measured by more than {TOLERANCE:.0%}, or an error above the "
        "budget, gives the sums of keys and values factors that would have made it right, and the problem is solved "
        "again.",
        "",
        *_rounds(found),
        "",
        f"It ended there because {found.outcome}; round {found.chosen + 1} is the answer.",
        "",
        "## Layers",
        "",
        *_layers(problem, answer),
        "",
        "## Candidates",
        "",
        *_candidates(problem),
    ]
    return [*lines, "", environment_line(environment), ""]


def _text_line(source: Source) -> str:
    text, protocol, other = source.text, source.protocol, source.held_out
    line = (
        f"Measured on {windows_of(text)} of {protocol.context} tokens of {text['text']} from character "
        f"{text['offset']} (sha256 {text['sha256'][:12]}), prefill {protocol.prefill}, then steps of {protocol.step}, "
        f"{source.device.dtype}."
    )
    return line if other is None else f"{line} Held out: the next {windows_of(other)}."


def windows_of(text: Mapping[str, Any]) -> str:
    """How many windows of a text were measured."""
    return f"{text['windows']} window{'s' * (text['windows'] != 1)}"


def _results(found: Calibration) -> list[str]:
    """Predicted and measured figures of the answer and of the best uniform allocation."""
    names = [*found.answer.predicted, *found.answer.predicted_size]
    titles = [f"{_TITLES[name]}, {what}" for name in names for what in ("predicted", "measured")]
    tokens = found.problem.sizes.context_length
    titles = [title.replace("bytes", f"bytes at {tokens:,} tokens") for title in titles]
    titles += ["KL of predictions", "top-1", "perplexity ÷ dense"]
    titles += ["held out: KL [95 %]", "top-1"] if found.held_out else []
    lines = ["| settings | " + " | ".join(titles) + " |", "| --- " * (1 + len(titles)) + "|"]
    for name, row in found.rows.items():
        predicted, measured = {**row.predicted, **row.predicted_size}, {**row.measured, **row.measured_size}
        cells = [_number(key, figures[key]) for key in names for figures in (predicted, measured)]
        for scores, is_held_out in ((found.scores, False), (found.held_out, True)):
            score = score_figures(scores, name)
            if score is None:
                continue
            cells += [_kl(score) if is_held_out else f"{score['kl']:.4g}", f"{score['top1']:.3f}"]
            cells += [] if is_held_out else [f"{score['ratio']:.4f}"]
        label = name if name == ALLOCATION else f"{name}: `{'` and `'.join(next(iter(row.pairs.values())))}`"
        label += "" if row.is_met else " (misses the budget)"
        lines.append("| " + " | ".join([label, *cells]) + " |")
    if found.uniform is None:
        lines += ["", "No pair of candidates meets the budget by its prediction if all layers get the same."]
    else:
        lines += ["", "*uniform* is the best pair of candidates that all layers could share within the budget."]
    return lines


_TITLES = {
    "kl": "KL",
    "key_kl": "KL of attention, keys",
    "value_error": "output error, values",
    "bits": "bits per value",
    "bytes": "bytes",
}


def _number(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "bytes" else f"{value:.2f}" if name == "bits" else f"{value:.4g}"


def _kl(score: Mapping[str, Any]) -> str:
    interval = score["kl_interval"]
    span = "" if interval is None else f" [{interval[0]:.4g}–{interval[1]:.4g}]"  # noqa: RUF001 - a range
    return f"{score['kl']:.4g}{span}"


def _rounds(found: Calibration) -> list[str]:
    names = list(found.answer.predicted)
    titles = ["round", "factors, keys and values"]
    titles += [f"{_TITLES[name]}, {what}" for name in names for what in ("predicted", "measured")]
    titles += ["missed by", "bits per value", "keys alone: KL", "values alone: KL", "within the budget"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for place, done in enumerate(found.rounds):
        cells = [str(place + 1), f"{done.factors.key:.3f}, {done.factors.value:.3f}"]
        cells += [f"{figures[name]:.4g}" for name in names for figures in (done.predicted, done.measured)]
        cells += [f"{done.miss:.0%}", f"{done.measured_size['bits']:.3f}"]
        cells += ["–", "–"] if done.sides is None else [f"{kl:.4g}" for kl in done.sides]  # noqa: RUF001 - no figure
        lines.append("| " + " | ".join([*cells, "yes" if done.is_met else "no"]) + " |")
    return lines


def _layers(problem: Problem, answer: Round) -> list[str]:
    errors = problem.sensitivities.errors
    lines = ["| layer | keys | error alone | values | error alone | bits per value |", "| --- " * 6 + "|"]
    for index, pair in answer.pairs.items():
        cells = [f"{index}"]
        for side, name in zip(SIDES, pair, strict=True):
            cells += [f"`{name}`", f"{errors[side][index][name]:.4g}"]
        bits = problem.sizes.pair(index, *pair).bits / problem.sizes.values[index]
        lines.append("| " + " | ".join([*cells, f"{bits:.2f}"]) + " |")
    return lines


def _candidates(problem: Problem) -> Sequence[str]:
    """Settings, the sum of their errors over layers, and how many layers took them."""
    lines = ["| candidate | side | settings | RoPE | sum of errors alone |", "| --- " * 5 + "|"]
    for side in SIDES:
        for name, spec in problem.candidates.of(side).items():
            total = sum(errors_by_candidate(problem, side)[name])
            order = spec.rope if side == "key" else ""
            lines.append(f"| `{name}` | {side}s | {spec} | {order} | {total:.4g} |")
    return lines
