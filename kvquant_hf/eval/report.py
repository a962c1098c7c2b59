"""The report of a run file: plots first, then tables, cautions and settings, in markdown."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.compare import Comparison, compare, comparison_table
from kvquant_hf.eval.plots import Point, heat_maps, quality_against_size, save
from kvquant_hf.eval.runs import CacheRun, is_measured, read_run
from kvquant_hf.eval.statistics import mean_interval

REPORT = "report.md"


def write_report(output: Path, directories: Sequence[Path], name: str, description: str = "") -> Path:
    """Write `report.md`, `report.json` and the plots of a run.

    Args:
        output: Where they go.
        directories: Output directories of the caches, in the order in which they shall appear.
        name: Title.
        description: What the run is about.

    Returns:
        Path of the report.

    Raises:
        FileNotFoundError: A directory holds no complete results.
    """
    runs = [read_run(directory) for directory in directories]
    baseline = next((run for run in runs if not run.is_quantized), None)
    others = [run for run in runs if run is not baseline]
    compared = [(run, compare(baseline, run)) for run in others] if baseline is not None else []
    plots = _plots(output, runs)
    lines = [f"# {name}", ""]
    lines += [f"![{path.stem}]({path.name})" for path in plots]
    lines += ["", description, "", _heading(runs[0]), "", "## Scores", "", scores_table(runs)]
    if baseline is not None and others:
        lines += ["", f"## Against `{baseline.name}`", "", comparison_table(baseline, compared)]
    cautions = [f"- `{run.name}`: {text}" for run in runs for text in run.cautions]
    lines += ["", "## Cautions", "", *cautions] if cautions else []
    lines += ["", "## Settings", "", "```yaml", _settings(runs), "```", ""]
    write_json(output / "report.json", _summary(runs, compared))
    write_text(output / REPORT, "\n".join(lines))
    return output / REPORT


def _heading(run: CacheRun) -> str:
    environment = run.results["environment"]
    versions = run.config["versions"]
    counts = ", ".join(f"{n['effective']} samples of {task}" for task, n in run.results["n-samples"].items())
    return (
        f"{run.config['model']} ({run.results['config']['model_dtype']}), {counts}; batch {run.config['batch_size']}, "
        f"{run.config['device']} ({environment['device']}, {environment['threads']} threads), "
        + ", ".join(f"{package} {version}" for package, version in versions.items())
        + f", commit {environment['commit']}."
    )


def scores_table(runs: Sequence[CacheRun]) -> str:
    """Markdown: size, speed and every metric with its standard error, one row a cache."""
    keys = list(dict.fromkeys(key for run in runs for key in run.metrics()))
    titles = [f"{task} {metric}" + (f" ({kind})" if kind != "none" else "") for task, metric, kind in keys]
    lines = [
        "| cache | bits per value | quantized tokens | tokens/s | " + " | ".join(titles) + " |",
        "| --- " * (4 + len(keys)) + "|",
    ]
    for run in runs:
        stats, metrics = run.stats, run.metrics()
        cells = [
            f"`{run.name}`",
            _figure(stats["bits_per_value"], ".2f"),
            _figure(stats["quantized_tokens"], ","),
            _figure(stats["new_tokens_per_s"], ".2f"),
            *(_with_error(metrics.get(key)) for key in keys),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _with_error(found: tuple[float, float | None] | None) -> str:
    if found is None:
        return "-"
    value, error = found
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _plots(output: Path, runs: Sequence[CacheRun]) -> list[Path]:
    """Paths of the PNG files, each of which has an SVG twin."""
    panels: dict[str, list[Point]] = {}
    for run in runs:
        bits = run.stats["bits_per_value"]
        intervals = {(item["task"], item["metric"], item["filter"]): item["interval"] for item in _intervals(run)}
        for key, (value, _) in run.metrics().items():
            title = f"{key[0]}, {key[1]}" + (f" ({key[2]})" if key[2] != "none" else "")
            if bits is not None:
                point = Point(run.name, bits, value, intervals.get(key), not run.is_quantized)
                panels.setdefault(title, []).append(point)
    paths = []
    if panels:
        paths.append(save(quality_against_size(panels, "mean over samples, 95 %"), output / "quality")[0])
    grids = {f"{task}, {run.name}": cells for run in runs for task, cells in retrieval_grids(run).items()}
    if grids:
        figure = heat_maps(grids, "prompt length, tokens", "depth of the fact", "share retrieved")
        paths.append(save(figure, output / "retrieval")[0])
    return paths


def retrieval_grids(run: CacheRun) -> dict[str, dict[tuple[float, float], float]]:
    """Share retrieved by `(length, depth)`, by retrieval task."""
    found: dict[str, dict[tuple[float, float], list[float]]] = {}
    for (task, _, _), sample in run.samples.items():
        if "retrieved" in sample["metrics"]:
            cell = (sample["doc"]["length"], sample["doc"]["depth"])
            found.setdefault(task, {}).setdefault(cell, []).append(float(sample["retrieved"]))
    return {task: {cell: sum(values) / len(values) for cell, values in cells.items()} for task, cells in found.items()}


def _settings(runs: Sequence[CacheRun]) -> str:
    shared = {key: value for key, value in runs[0].config.items() if key not in ("quant", "name")}
    caches = {run.name: run.config["quant"] for run in runs}
    text: str = yaml.safe_dump({**shared, "caches": caches}, sort_keys=False)
    return text.rstrip()


def _summary(runs: Sequence[CacheRun], compared: Sequence[tuple[CacheRun, Sequence[Comparison]]]) -> dict[str, Any]:
    """The report as plain values, one entry a cache."""
    comparisons = {run.name: [item.to_dict() for item in items] for run, items in compared}
    return {
        "settings": {key: value for key, value in runs[0].config.items() if key not in ("quant", "name")},
        "environment": runs[0].results["environment"],
        "caches": [
            {
                "name": run.name,
                "directory": run.directory.name,
                "quant": run.config["quant"],
                "stats": run.stats,
                "cautions": run.cautions,
                "metrics": [
                    {"task": task, "metric": metric, "filter": kind, "value": value, "stderr": error}
                    for (task, metric, kind), (value, error) in run.metrics().items()
                ],
                "intervals": _intervals(run),
                "against_baseline": comparisons.get(run.name),
            }
            for run in runs
        ],
    }


def _intervals(run: CacheRun) -> list[dict[str, Any]]:
    """Bootstrap intervals over samples of every metric that samples carry."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for (task, kind, _), sample in run.samples.items():
        for metric in sample["metrics"]:
            if is_measured(metric, sample.get(metric)):
                values.setdefault((task, metric, kind), []).append(float(sample[metric]))
    return [
        {"task": task, "metric": metric, "filter": kind, "interval": mean_interval(found)}
        for (task, metric, kind), found in values.items()
    ]
