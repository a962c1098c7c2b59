"""What a budget was spent on: preset, plots, markdown, JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kvquant_hf.analysis.allocation import Problem
from kvquant_hf.analysis.budget import amount
from kvquant_hf.analysis.budget_markdown import (
    PRESET,
    Source,
    errors_by_candidate,
    markdown,
    score_figures,
    windows_of,
)
from kvquant_hf.analysis.calibration import Calibration
from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.measures import MEASURES
from kvquant_hf.analysis.meter import ATTENTION_MEASURES
from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.environment import run_environment


def write_budget_report(found: Calibration, source: Source, output: Path) -> Path:
    """Write `preset.yaml`, `report.md`, `report.json` and the plots `sensitivity` and `allocation` (PNG and SVG).

    Args:
        found: The answer.
        source: What it was measured on.
        output: Where the files go.

    Returns:
        Path of the markdown report.
    """
    # Imported here: measuring itself does without matplotlib.
    from kvquant_hf.eval.plots import curves, save

    problem = found.problem
    layers = [float(index) for index in problem.sizes.layers]
    lines = {f"{side}s: {_measure(problem, side)}": errors_by_candidate(problem, side) for side in SIDES}
    # A logarithmic axis has no place for an error that rounding hides.
    lines = {
        title: {name: [value or math.nan for value in values] for name, values in series.items()}
        for title, series in lines.items()
    }
    save(curves(lines, layers, "layer", "error of this layer and side alone", log=True), output / "sensitivity")
    bits = {
        "allocation": {
            f"{side}s": [
                problem.candidates.of(side)[pair[place]].bits_per_value(problem.sizes.shapes[index][1 + place])
                for index, pair in found.answer.pairs.items()
            ]
            for place, side in enumerate(SIDES)
        }
    }
    save(curves(bits, layers, "layer", "bits per value, metadata included", log=False), output / "allocation")
    environment = run_environment(source.device.device)
    write_text(output / PRESET, preset_text(found, source))
    write_json(output / "report.json", _json(found, source, environment))
    write_text(output / "report.md", "\n".join(markdown(found, source, environment)))
    return output / "report.md"


def preset_text(found: Calibration, source: Source) -> str:
    """The answer as YAML, which `KVQuantConfig.from_yaml` reads, with a description that says what it is for."""
    return yaml.safe_dump(
        {"description": description(found, source), **found.config.to_dict()}, sort_keys=False, width=119
    )


def description(found: Calibration, source: Source) -> str:
    """One line: the budget, and predicted and measured error and size."""
    answer = found.answer
    parts = [
        f"{_named(name, value)} predicted, {amount(name, measured[name])} measured"
        + (f" at {found.problem.sizes.context_length:,} tokens" if name == "bytes" else "")
        for predicted, measured in ((answer.predicted, answer.measured), (answer.predicted_size, answer.measured_size))
        for name, value in predicted.items()
    ]
    text = source.text
    missed = "" if answer.is_met else " (MISSED)"
    return (
        f"{found.problem.budget}{missed}, for {source.model}; {', '.join(parts)}; {windows_of(text)} of "
        f"{source.protocol.context} tokens of {text['text']}"
    )


def _named(name: str, value: float) -> str:
    """A figure that says what it is, as far as its unit does not."""
    titles = {"kl": "KL ", "key_kl": "key KL ", "value_error": "value error "}
    return titles.get(name, "") + amount(name, value)


def _measure(problem: Problem, side: str) -> str:
    if problem.budget.kind == "attention":
        return MEASURES[ATTENTION_MEASURES[side]].title
    return "KL of predictions, nats"


# ---- JSON ----------------------------------------------------------------------------------------------------------


def _json(found: Calibration, source: Source, environment: Mapping[str, Any]) -> dict[str, Any]:
    problem = found.problem
    return {
        "environment": environment,
        "model": source.model,
        "protocol": {**asdict(source.protocol), "queries": source.queries, **asdict(source.device)},
        "text": source.text,
        "held_out_text": source.held_out,
        "budget": {name: value for name, value in asdict(problem.budget).items() if value is not None},
        "description": description(found, source),
        "is_met": found.answer.is_met,
        "preset": found.config.to_dict(),
        "results": {
            name: {
                **row.to_dict(),
                "scores": score_figures(found.scores, name),
                "held_out": score_figures(found.held_out, name),
            }
            for name, row in found.rows.items()
        },
        "rounds": [done.to_dict() for done in found.rounds],
        "chosen_round": found.chosen,
        "outcome": found.outcome,
        "candidates": problem.candidates.to_dict(),
        "sensitivities": {
            side: {str(index): dict(problem.sensitivities.errors[side][index]) for index in problem.sizes.layers}
            for side in SIDES
        },
    }
