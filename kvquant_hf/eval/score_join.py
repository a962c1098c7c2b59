"""Reports of several scoring runs as one: more models, or more caches of a model, under the same protocol."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.artifacts import read_json
from kvquant_hf.eval.score import REFERENCE
from kvquant_hf.eval.score_report import Row, environments_of, rows_by_model

REPORT = "report.json"
_PARTS = ("protocol", "bits_dtype", "texts", "configs", "results")
_SAME = ("protocol", "bits_dtype", "texts")
# Perplexities of one dense model on one text in runs of different machines or versions of torch.
_REFERENCE_TOLERANCE = 1e-3


def join_reports(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of what several hold.

    Args:
        paths: JSON reports of `scripts/score.py` or of this function, or directories that hold one.

    Returns:
        A report for `write_score_report`: rows by model in the order they are met, the dense cache of each model once;
        `environments` in place of `environment`.

    Raises:
        FileNotFoundError: There is no report at a path.
        ValueError: A file is no report; or reports differ in protocol or texts, give one name to different settings,
            score a cache of a model twice, or disagree about a dense model.
    """
    files = [path / REPORT if path.is_dir() else path for path in paths]
    if len(set(files)) < len(files):
        raise ValueError(f"`paths` must name each report once, got {[str(file) for file in files]}.")
    reports = {file: _read(file) for file in files}
    first = files[0]
    configs: dict[str, Any] = {}
    models: dict[str, dict[str, Row]] = {}
    for file, report in reports.items():
        for name in _SAME:
            if report[name] != reports[first][name]:
                raise ValueError(
                    f"`{name}` must be the same in all reports: {first} has {reports[first][name]}, {file} "
                    f"{report[name]}."
                )
        for name, config in report["configs"].items():
            if name in configs and _settings(configs[name]) != _settings(config):
                raise ValueError(f"`{name}` must mean the same in all reports, {file} has other settings.")
            configs.setdefault(name, config)
        for model, rows in rows_by_model(report["results"]).items():
            _add(models.setdefault(model, {}), rows, file)
    return {
        **{name: reports[first][name] for name in _SAME},
        "environments": [found for report in reports.values() for found in environments_of(report)],
        "configs": configs,
        "results": [row for rows in models.values() for row in rows.values()],
    }


def _read(file: Path) -> dict[str, Any]:
    report = read_json(file)
    missing = [name for name in _PARTS if not isinstance(report, dict) or name not in report]
    if missing:
        raise ValueError(f"{file} is no report of scripts/score.py: it lacks {missing}.")
    return dict(report)


def _settings(config: Mapping[str, Any]) -> KVQuantConfig:
    """Settings with those that did not exist when a report was written at their defaults."""
    return KVQuantConfig.from_dict(config)


def _add(known: dict[str, Row], rows: Sequence[Row], file: Path) -> None:
    """Add the rows of one model in one report to those known of it."""
    for row in rows:
        name = row["quant"]
        if name not in known:
            known[name] = row
        elif name != REFERENCE:
            raise ValueError(f"`{name}` must be scored once on {row['model']}, {file} has it again.")
        elif not math.isclose(row["perplexity"], known[name]["perplexity"], rel_tol=_REFERENCE_TOLERANCE):
            raise ValueError(
                f"The dense perplexity of {row['model']} must be that of the other reports, "
                f"{known[name]['perplexity']:.4f}; {file} has {row['perplexity']:.4f}: the model is another one."
            )
