"""What orders of channels were found: preset, plot, markdown, JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvquant_hf.analysis.budget_markdown import PRESET, windows_of
from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.channel_orders import MEASURE_OF, NATURAL, RULES, OrderCalibration, SideOrder
from kvquant_hf.analysis.level_report import CalibrationSource, preset_text
from kvquant_hf.analysis.measures import ERRORS
from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.environment import environment_line, run_environment
from kvquant_hf.eval.score import Protocol


def write_order_report(found: OrderCalibration, source: CalibrationSource, protocol: Protocol, output: Path) -> Path:
    """Write `preset.yaml`, `report.md`, `report.json` and the plot `errors` (PNG and SVG).

    Args:
        found: The orders.
        source: What they were made from.
        protocol: How caches were fed.
        output: Where the files go.

    Returns:
        Path of the markdown report.
    """
    # Imported here: measuring itself does without matplotlib.
    from kvquant_hf.eval.plots import curves, save

    panels = {
        f"{side}s: {ERRORS[MEASURE_OF[side]].title}": {name: _ratios(found, side, name) for name in RULES}
        for side in _sides(found)
    }
    xs = [float(index) for index in found.orders]
    save(curves(panels, xs, "layer", "error ÷ that of the model's order", log=False), output / "errors")
    environment = run_environment(source.device.device)
    write_text(output / PRESET, preset_text(found.config, description(found, source), output))
    write_json(output / "report.json", _json(found, source, protocol, environment))
    write_text(output / "report.md", "\n".join(_markdown(found, source, protocol, environment)))
    return output / "report.md"


def description(found: OrderCalibration, source: CalibrationSource) -> str:
    """One line: what the orders are and where they come from."""
    sides = " and ".join(f"{side}s" for side in _sides(found))
    return (
        f"channels of {sides} in orders by layer, for {source.model}; other settings of {source.settings}; "
        f"{windows_of(source.text)} of {source.context} tokens of {source.text['text']}"
    )


def mean_ratio(found: OrderCalibration, side: str) -> float | None:
    """Geometric mean over layers of a side's error over that with the model's order."""
    entries = [sides[side] for sides in found.orders.values() if side in sides]
    logs = [math.log(ratio) for entry in entries if (ratio := _ratio(entry, entry.rule)) > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _sides(found: OrderCalibration) -> list[str]:
    return [side for side in SIDES if any(side in sides for sides in found.orders.values())]


def _ratio(entry: SideOrder, rule: str) -> float:
    natural = entry.errors[NATURAL]
    return entry.errors[rule] / natural if natural else math.nan


def _ratios(found: OrderCalibration, side: str, rule: str) -> list[float]:
    return [_ratio(sides[side], rule) if side in sides else math.nan for sides in found.orders.values()]


def _json(
    found: OrderCalibration, source: CalibrationSource, protocol: Protocol, environment: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "environment": environment,
        "model": source.model,
        "settings": source.settings,
        "protocol": {**asdict(protocol), **asdict(source.device)},
        "text": source.text,
        "description": description(found, source),
        "preset": found.config.to_dict(),
        "mean_error_ratios": {side: mean_ratio(found, side) for side in _sides(found)},
        "orders": {
            str(index): {side: asdict(entry) for side, entry in sides.items()} for index, sides in found.orders.items()
        },
    }


def _markdown(
    found: OrderCalibration, source: CalibrationSource, protocol: Protocol, environment: Mapping[str, Any]
) -> list[str]:
    text = source.text
    lines = ["# Orders of channels", "", "![errors](errors.png)", ""]
    lines += [
        f"{description(found, source)}, from character {text['offset']} (sha256 {text['sha256'][:12]}), "
        f"prefill {protocol.prefill}, then steps of {protocol.step}, {source.device.dtype}. Settings in "
        f"[`{PRESET}`]({PRESET}).",
        "",
        *(f"- {side}s: {ERRORS[MEASURE_OF[side]].definition}." for side in _sides(found)),
        "",
        "Errors on the text calibrated on, with the model's order and, in its units, with each rule's.",
        "",
    ]
    titles = ["layer", "side", "model's order", *(f"{rule} ÷" for rule in RULES), "chosen"]
    lines += ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for index, sides in found.orders.items():
        for side, entry in sides.items():
            cells = [str(index), f"{side}s", f"{entry.errors[NATURAL]:.3g}"]
            cells += [f"{_ratio(entry, rule):.3f}" for rule in RULES]
            lines.append("| " + " | ".join([*cells, entry.rule]) + " |")
    return [*lines, "", environment_line(environment), ""]
