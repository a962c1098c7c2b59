"""Reports of the analysis: plots, markdown, JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvquant_hf.analysis.ablation import Ablation
from kvquant_hf.analysis.attention_error import FACTS_NAME
from kvquant_hf.analysis.claims import Verdict
from kvquant_hf.analysis.measures import ERRORS, FACTS, MEASURES, HeadSums
from kvquant_hf.analysis.run import Device, Measured, text_facts
from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.environment import environment_line, run_environment
from kvquant_hf.eval.score import REFERENCE
from kvquant_hf.eval.statistics import mean_interval

_OVERVIEW = (
    "key_error",
    "probability_error",
    "value_error",
    "output_error_from_values",
    "output_error",
)
_BY_LAYER = (*_OVERVIEW, "attention_kl")
_KL_TITLE = "predictions, KL to the dense cache"


def write_report(ablation: Ablation, measured: Sequence[Measured], output: Path, device: Device) -> Path:
    """Write `report.md`, `layers.md`, `report.json` and the plots (PNG and SVG).

    Args:
        ablation: What was measured.
        measured: The models, in order.
        output: Where the files go.
        device: Where the models ran.

    Returns:
        Path of the markdown report.
    """
    # Imported here: measuring itself does without matplotlib.
    from kvquant_hf.eval.plots import curves, dots, head_maps, save

    save(dots(_overview(ablation, measured)), output / "overview")
    for model in measured:
        totals = {name: model.total(name) for name in ablation.settings}
        lines = {MEASURES[m].title: {name: t.by_layer(m) for name, t in totals.items()} for m in _BY_LAYER}
        layers = [float(index) for index in next(iter(totals.values())).layers]
        save(curves(lines, layers, "layer", "mean over heads", log=True), output / f"layers-{model.model}")
        heads = {name: total.values("output_error") for name, total in totals.items()}
        save(head_maps(heads, "relative error of the attention output"), output / f"heads-{model.model}")
    facts = {
        "ablation": ablation.to_dict(),
        "text": text_facts(ablation.text, ablation.start, ablation.windows),
        "device": asdict(device),
    }
    environment = run_environment(device.device)
    report = {"environment": environment, **facts, "models": [_model_json(ablation, model) for model in measured]}
    write_json(output / "report.json", report)
    write_text(output / "layers.md", "\n".join(_layer_tables(ablation, measured)))
    write_text(output / "report.md", "\n".join(_markdown(ablation, measured, report)))
    return output / "report.md"


def _overview(ablation: Ablation, measured: Sequence[Measured]) -> dict[str, dict[str, dict[str, float]]]:
    panels = {
        f"{MEASURES[metric].title}, relative error": {
            model.model: {name: model.value(metric, name) for name in ablation.settings} for model in measured
        }
        for metric in _OVERVIEW
    }
    if ablation.scores:
        panels[_KL_TITLE] = {m.model: {name: m.value("kl", name) for name in ablation.settings} for m in measured}
    return panels


# ---- JSON ----------------------------------------------------------------------------------------------------------


def _model_json(ablation: Ablation, measured: Measured) -> dict[str, Any]:
    return {
        "model": measured.model,
        "claims": [verdict.to_dict() for verdict in measured.verdicts],
        "settings": {
            name: {"attention": _sums_json(measured.total(name), ERRORS), "scores": _score_json(measured, name)}
            for name in ablation.settings
        },
        "dense": _score_json(measured, REFERENCE),
        "facts": _sums_json(measured.total(FACTS_NAME), FACTS),
    }


def _sums_json(total: HeadSums, names: Mapping[str, object]) -> dict[str, Any]:
    return {
        "layers": list(total.layers),
        "mean": {name: total.mean(name) for name in names},
        # Six digits: a report of a large model holds tens of thousands of these.
        "heads": {name: [[float(f"{x:.6g}") for x in row] for row in total.values(name)] for name in names},
    }


def _score_json(measured: Measured, name: str) -> dict[str, Any] | None:
    if not measured.scores:
        return None
    score = measured.scores[name]
    kl = [sum(chunk.kl) / sum(chunk.tokens) for chunk in score.chunks]
    return {
        "perplexity": score.perplexity,
        "ratio": score.perplexity / measured.scores[REFERENCE].perplexity,
        "kl": score.kl,
        "kl_interval": mean_interval(kl),
        "kl_by_window": kl,
        "top1": score.top1,
        "tokens": score.tokens,
    }


# ---- markdown ------------------------------------------------------------------------------------------------------


def _markdown(ablation: Ablation, measured: Sequence[Measured], report: Mapping[str, Any]) -> list[str]:
    protocol, text, environment = ablation.protocol, report["text"], report["environment"]
    lines = [f"# {ablation.title}", "", "![overview](overview.png)", ""]
    lines += [ablation.description.strip(), ""] if ablation.description else []
    lines += [
        f"{ablation.windows} windows of {protocol.context} tokens of {text['text']} from character {text['offset']} "
        f"(sha256 {text['sha256'][:12]}), prefill {protocol.prefill}, then steps of {protocol.step}; attention of the "
        f"last {min(ablation.queries, protocol.scored)} queries of each window; {report['device']['dtype']}. "
        "Attention errors are means over heads and layers.",
    ]
    if ablation.claims:
        lines += ["", "## Published findings", "", *_claims_table(measured)]
    for model in measured:
        lines += ["", f"## {model.model}", "", *_settings_table(ablation, model), "", _facts_line(model), ""]
        lines += [f"![layers](layers-{model.model}.png)", f"![heads](heads-{model.model}.png)"]
    lines += ["", "[All errors by layer](layers.md).", "", "## What the columns mean", ""]
    lines += [f"- *{measure.title}*: {measure.definition}." for measure in MEASURES.values()]
    return [*lines, "", environment_line(environment), ""]


def _claims_table(measured: Sequence[Measured]) -> list[str]:
    """A row for each claim: what was published, what is needed, what each model gave."""
    lines = ["| finding | published | needed | " + " | ".join(model.model for model in measured) + " |"]
    lines.append("| --- " * (3 + len(measured)) + "|")
    for verdicts in zip(*(model.verdicts for model in measured), strict=True):
        claim = verdicts[0].claim
        published = "direction only" if claim.published is None else f"{claim.effect} {claim.published:.3g}"
        note = f" *{claim.note}*" if claim.note else ""
        needed = f"> {claim.needed:.3g}" if claim.published is None else f"≥ {claim.needed:.3g}"
        cells = [f"{claim.text}{note}", f"{published}: {claim.figures} ({claim.source})", needed]
        lines.append("| " + " | ".join([*cells, *map(_verdict_cell, verdicts)]) + " |")
    lines += [
        "",
        "A finding counts as reproduced if the effect has the published direction and at least half its size (of "
        "ratios, half on a logarithmic scale). `2/2` counts the windows that pass the test alone.",
    ]
    return lines


def _verdict_cell(verdict: Verdict) -> str:
    values = ", ".join(f"{value:.4g}" for value in verdict.values.values())
    windows = f"{verdict.agreeing}/{len(verdict.windows)}"
    return f"**{verdict.word}**: {verdict.claim.effect} {verdict.effect:.3g} ({values}), {windows}"


def _settings_table(ablation: Ablation, measured: Measured) -> list[str]:
    titles = [measure.title for measure in ERRORS.values()]
    titles += ["KL of predictions", "perplexity", "÷ dense", "top-1"] if measured.scores else []
    lines = ["| setting | " + " | ".join(titles) + " |", "| --- " * (1 + len(titles)) + "|"]
    for name in ablation.settings:
        total = measured.total(name)
        cells = [f"`{name}`", *(f"{total.mean(metric):.4f}" for metric in ERRORS)]
        score = _score_json(measured, name)
        if score is not None:
            cells += [_with_interval(score), f"{score['perplexity']:.3f}", f"{score['ratio']:.4f}"]
            cells += [f"{score['top1']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if measured.scores:
        dense = measured.scores[REFERENCE]
        lines.append("| dense |" + " |" * len(ERRORS) + f" 0 | {dense.perplexity:.3f} | 1 | 1 |")
    return lines


def _with_interval(score: Mapping[str, Any]) -> str:
    interval = score["kl_interval"]
    span = "" if interval is None else f" [{interval[0]:.4f}–{interval[1]:.4f}]"  # noqa: RUF001 - a range
    return f"{score['kl']:.4f}{span}"


def _facts_line(measured: Measured) -> str:
    total = measured.total(FACTS_NAME)
    return "Exact attention: " + ", ".join(f"{FACTS[name].title} {total.mean(name):.3g}" for name in FACTS) + "."


def _layer_tables(ablation: Ablation, measured: Sequence[Measured]) -> list[str]:
    """Errors by layer, means over heads, one table for each model and setting."""
    lines = [f"# {ablation.title}: errors by layer, means over heads"]
    for model in measured:
        for name, metrics in [(FACTS_NAME, FACTS), *((name, ERRORS) for name in ablation.settings)]:
            total = model.total(name)
            lines += ["", f"## {model.model}, {name}", ""]
            lines += ["| layer | " + " | ".join(measure.title for measure in metrics.values()) + " |"]
            lines += ["| --- " * (1 + len(metrics)) + "|"]
            columns = [total.by_layer(metric) for metric in metrics]
            lines += [
                f"| {index} | " + " | ".join(f"{value:.4g}" for value in row) + " |"
                for index, row in zip(total.layers, zip(*columns, strict=True), strict=True)
            ]
    return [*lines, ""]
