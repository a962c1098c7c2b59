"""What levels were found: preset, plots, markdown, JSON."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from kvquant_hf.analysis.budget_markdown import PRESET, windows_of
from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.level_calibration import LevelCalibration, SideLevels
from kvquant_hf.analysis.run import Device
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.environment import environment_line, run_environment


@dataclass(frozen=True)
class CalibrationSource:
    """What was calibrated, and on what.

    Attributes:
        model: Name of the model.
        settings: The word for the other settings, as `kvquant_hf.eval.parse_quant` takes it.
        context: Tokens of a window.
        text: Facts of the text, see `kvquant_hf.analysis.run.text_facts`.
        device: Where the model ran.
    """

    model: str
    settings: str
    context: int
    text: Mapping[str, Any]
    device: Device


def write_level_report(found: LevelCalibration, source: CalibrationSource, output: Path) -> Path:
    """Write `preset.yaml`, `report.md`, `report.json` and the plots `levels` and `errors` (PNG and SVG).

    Args:
        found: The levels.
        source: What they were made from.
        output: Where the files go.

    Returns:
        Path of the markdown report.
    """
    # Imported here: measuring itself does without matplotlib.
    from kvquant_hf.eval.plots import curves, save

    xs = [float(index) for index in found.levels]
    sides = [side for side in SIDES if any(side in entry for entry in found.levels.values())]
    tables = {f"levels of {side}s": _lines(found, side) for side in sides}
    save(curves(tables, xs, "layer", "level, the group's range being -1 to 1", log=False), output / "levels")
    ratios = {f"error of {side}s ÷ evenly spaced levels": _ratios(found, side) for side in sides}
    save(curves(ratios, xs, "layer", "weighted squared error, ratio", log=False), output / "errors")
    environment = run_environment(source.device.device)
    write_text(output / PRESET, preset_text(found.config, description(found, source), output))
    write_json(output / "report.json", _json(found, source, environment))
    write_text(output / "report.md", "\n".join(_markdown(found, source, environment, sides)))
    return output / "report.md"


def preset_text(config: KVQuantConfig, description: str, output: Path) -> str:
    """The settings as YAML for a file in `output`, which `KVQuantConfig.from_yaml` reads, with a description."""
    settings = config.to_dict()
    if config.query_moments is not None:
        settings["query_moments"] = os.path.relpath(config.query_moments, output)
    return yaml.safe_dump(
        {"description": description, **settings}, sort_keys=False, width=119, default_flow_style=None
    )


def description(found: LevelCalibration, source: CalibrationSource) -> str:
    """One line: what the levels are and where they come from."""
    weights = "squared gradients of the loss" if found.is_weighted else "squared scales alone"
    kept = ", mean and deviation kept (Q-Norm)" * found.q_norm
    return (
        f"KVQuant's levels by layer, arXiv 2401.18079, weighted by {weights}{kept}, for {source.model}; other "
        f"settings of {source.settings}; {windows_of(source.text)} of {source.context} tokens of {source.text['text']}"
    )


def mean_ratio(found: LevelCalibration, side: str, other: str) -> float | None:
    """Mean over layers of the error of a side's levels over that of others, `even_error` or `gaussian_error`."""
    ratios = [_ratio(entry[side], other) for entry in found.levels.values() if side in entry]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return sum(known) / len(known) if known else None


def _lines(found: LevelCalibration, side: str) -> dict[str, list[float]]:
    """Each level of all layers, `nan` where a layer has fewer or none."""
    rows = [entry[side].levels if side in entry else () for entry in found.levels.values()]
    most = max(map(len, rows))
    return {str(place + 1): [row[place] if place < len(row) else math.nan for row in rows] for place in range(most)}


def _ratios(found: LevelCalibration, side: str) -> dict[str, list[float]]:
    entries = [entry.get(side) for entry in found.levels.values()]
    blank = [math.nan] * len(entries)
    return {
        "these levels": [blank[0] if entry is None else _ratio(entry, "even_error") for entry in entries],
        "Gaussian levels": [
            blank[0] if entry is None or not entry.even_error else entry.gaussian_error / entry.even_error
            for entry in entries
        ],
    }


def _ratio(entry: SideLevels, other: str) -> float:
    error: float = getattr(entry, other)
    return entry.error / error if error else math.nan


def _json(found: LevelCalibration, source: CalibrationSource, environment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "environment": environment,
        "model": source.model,
        "settings": source.settings,
        "protocol": {"context": source.context, **asdict(source.device)},
        "text": source.text,
        "q_norm": found.q_norm,
        "is_weighted": found.is_weighted,
        "description": description(found, source),
        "preset": found.config.to_dict(),
        "mean_error_ratios": {
            side: {
                "even": mean_ratio(found, side, "even_error"),
                "gaussian": mean_ratio(found, side, "gaussian_error"),
            }
            for side in SIDES
        },
        "levels": {
            str(index): {side: asdict(entry) for side, entry in sides.items()} for index, sides in found.levels.items()
        },
    }


def _markdown(
    found: LevelCalibration, source: CalibrationSource, environment: Mapping[str, Any], sides: list[str]
) -> list[str]:
    text = source.text
    lines = ["# Calibrated levels", "", "![levels](levels.png)", ""]
    lines += [
        f"{description(found, source)}, from character {text['offset']} (sha256 {text['sha256'][:12]}), "
        f"{source.device.dtype}. Settings in [`{PRESET}`]({PRESET}).",
        "",
        "Errors are mean squared distances to the nearest level in units of half ranges, weighted, on the text "
        "calibrated on; 'even' are evenly spaced levels, 'Gaussian' those of `levels: gaussian`. Mean and deviation "
        "are those of the samples in such units, and of their nearest levels.",
        "",
        "| side | error ÷ even, mean of layers | error ÷ Gaussian |",
        "| --- | --- | --- |",
    ]
    for side in sides:
        ratios = (mean_ratio(found, side, name) for name in ("even_error", "gaussian_error"))
        lines.append(f"| {side}s | " + " | ".join("–" if r is None else f"{r:.3f}" for r in ratios) + " |")  # noqa: RUF001
    lines += ["", "![errors](errors.png)", ""]
    titles = ["layer", "side", "levels", "error", "÷ even", "÷ Gaussian", "mean, deviation", "decoded"]
    lines += ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for index, entries in found.levels.items():
        for side, entry in entries.items():
            cells = [str(index), f"{side}s", " ".join(f"{level:.3f}" for level in entry.levels), f"{entry.error:.3g}"]
            cells += [f"{_ratio(entry, name):.3f}" for name in ("even_error", "gaussian_error")]
            cells += [f"{mean:.4f}, {deviation:.4f}" for mean, deviation in (entry.moments, entry.decoded_moments)]
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", environment_line(environment), ""]
