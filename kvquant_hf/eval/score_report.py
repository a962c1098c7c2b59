"""Results of a scoring run: rows with intervals, a table, plots and a markdown report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.bits import HeldBits
from kvquant_hf.eval.divergence import Divergence, summarize_divergence
from kvquant_hf.eval.environment import environment_line
from kvquant_hf.eval.score import REFERENCE, Protocol, Score
from kvquant_hf.eval.statistics import Interval, mean_interval

if TYPE_CHECKING:
    from kvquant_hf.eval.plots import Point

# Files, what lies to the right, what goes upwards, and how that is called. Smaller is better in all of them.
PARETO_PLOTS = (
    ("pareto", "bits_per_value", "kl", "KL to the dense cache, nats"),
    ("pareto_quantized", "bits_per_value_quantized", "kl", "KL to the dense cache, nats"),
    ("pareto_perplexity", "bits_per_value_quantized", "ratio", "perplexity over the dense cache's"),
    ("pareto_top1", "bits_per_value_quantized", "top1", "share of likeliest tokens that change"),
)
# What a report of several models compares them by: figure of a row, title and form.
SUMMARIES = (
    ("kl", "KL to the dense cache", ".5f"),
    ("ratio", "Perplexity over the dense cache's", ".4f"),
    ("top1", "Share of likeliest tokens that stay", ".3f"),
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ModelScores:
    """One model with all its caches.

    Attributes:
        model: Its name.
        scores: By cache, the reference first.
        bits: What each cache holds, by cache.
        divergence: First differences of greedy text by cache, where they were measured.
    """

    model: str
    scores: Mapping[str, Score]
    bits: Mapping[str, HeldBits]
    divergence: Mapping[str, Divergence] = field(default_factory=dict)

    def intervals(self, name: str) -> dict[str, Interval | None]:
        """95 % bootstrap intervals of `kl`, `top1` and `ratio` of a cache, over chunks of text.

        The perplexity ratio is paired: each chunk's log-likelihoods are set against the reference's of that chunk.
        """
        chunks, dense = self.scores[name].chunks, self.scores[REFERENCE].chunks
        kl = [sum(chunk.kl) / sum(chunk.tokens) for chunk in chunks]
        top1 = [sum(chunk.agreed) / sum(chunk.tokens) for chunk in chunks]
        excess = [
            (sum(chunk.nll) - sum(base.nll)) / sum(chunk.tokens) for chunk, base in zip(chunks, dense, strict=True)
        ]
        log_ratio = mean_interval(excess)
        ratio = None if log_ratio is None else (math.exp(log_ratio[0]), math.exp(log_ratio[1]))
        return {"kl": mean_interval(kl), "top1": mean_interval(top1), "ratio": ratio}

    def rows(self) -> list[dict[str, Any]]:
        """One row a cache, for JSON."""
        dense = self.scores[REFERENCE].perplexity
        return [
            {
                "model": self.model,
                "quant": name,
                "bits_per_value": self.bits[name].bits_per_value,
                "bits_per_value_quantized": self.bits[name].bits_per_value_quantized,
                "memory_bytes": self.bits[name].memory_bytes,
                "perplexity": score.perplexity,
                "ratio": score.perplexity / dense,
                "kl": score.kl,
                "top1": score.top1,
                "tokens": score.tokens,
                "intervals": self.intervals(name),
                "first_divergence": self._divergence(name),
                "curves": {metric: score.curve(metric) for metric in ("nll", "kl", "agreed")},
            }
            for name, score in self.scores.items()
        ]

    def _divergence(self, name: str) -> dict[str, object] | None:
        found = self.divergence.get(name)
        return None if found is None else summarize_divergence(found.first, found.tokens)


def table(measured: ModelScores) -> str:
    """The scores of a model as aligned text."""
    width = max(len(name) for name in measured.scores)
    lines = [f"{'cache':<{width}}   bits  bits (q)  perplexity    ratio       KL  {'KL, 95 %':<17}  top-1  diverges"]
    for row in measured.rows():
        quantized, interval = row["bits_per_value_quantized"], row["intervals"]["kl"]
        lines.append(
            f"{row['quant']:<{width}}  {row['bits_per_value']:>5.2f}"
            f"  {'-' if quantized is None else f'{quantized:.2f}':>8}"
            f"  {row['perplexity']:>10.3f}  {row['ratio']:>7.4f}  {row['kl']:>7.5f}"
            f"  {_interval(interval, '.5f'):<17}  {row['top1']:>5.3f}  {_diverges(row['first_divergence']):>8}"
        )
    return "\n".join(lines)


def _interval(interval: Interval | None, form: str) -> str:
    return "-" if interval is None else f"{interval[0]:{form}}–{interval[1]:{form}}"  # noqa: RUF001 - a range


def _diverges(found: Mapping[str, Any] | None) -> str:
    """Median position of the first difference; `>n` where most texts never differ."""
    if found is None:
        return "-"
    return f">{found['tokens']}" if 2 * found["never"] > len(found["first"]) else f"{found['median']:.0f}"


def write_score_report(directory: Path, report: Mapping[str, Any]) -> Path:
    """Write `report.md`, `report.json` and the plots of `PARETO_PLOTS` and `curves` (PNG and SVG).

    Args:
        directory: Where they go.
        report: What goes into the JSON file. Its `results` are rows of `ModelScores.rows`; its `protocol`, its `texts`
            and its `environment` (or `environments`, of several runs) are told in words, too.

    Returns:
        Path of the markdown report.
    """
    # Imported here: scoring itself does without matplotlib.
    from kvquant_hf.eval.plots import curves, quality_against_size, save

    models = rows_by_model(report["results"])
    for name, size, metric, label in PARETO_PLOTS:
        log = metric != "ratio"
        figure = quality_against_size(_points(models, size, metric), label, log=log, front=True)
        save(figure, directory / name)
    lines = {
        model: {row["quant"]: row["curves"]["kl"] for row in rows if row["quant"] != REFERENCE}
        for model, rows in models.items()
    }
    options = report["protocol"]
    protocol = Protocol(options["context"], options["prefill"], options["step"])
    middles = [(first + end) / 2 for first, end in protocol.bins()]
    save(curves(lines, middles, "position, tokens", "KL to the dense cache, nats", log=True), directory / "curves")
    write_json(directory / "report.json", report)
    write_text(directory / "report.md", "\n".join(_markdown(models, report)))
    return directory / "report.md"


def rows_by_model(results: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of `ModelScores.rows` by model, in order."""
    models: dict[str, list[Row]] = {}
    for row in results:
        models.setdefault(row["model"], []).append(row)
    return models


def environments_of(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a report's runs ran on: several of a joint one."""
    return list(report["environments"]) if "environments" in report else [report["environment"]]


def _points(models: Mapping[str, Sequence[Row]], size: str, metric: str) -> dict[str, list["Point"]]:
    """Points of a Pareto plot by model; caches without a quantized part have no place where sizes are those of it."""
    from kvquant_hf.eval.plots import Point

    points: dict[str, list[Point]] = {}
    for model, rows in models.items():
        drawn = points.setdefault(model, [])
        for row in rows:
            if row[size] is None:
                continue
            value, interval = row[metric], row["intervals"][metric]
            if metric == "top1":
                value, interval = 1 - value, None if interval is None else (1 - interval[1], 1 - interval[0])
            drawn.append(Point(row["quant"], row[size], value, interval))
    return points


def _summary(models: Mapping[str, Sequence[Row]], metric: str, title: str, form: str) -> list[str]:
    """A figure of every cache on every model, smallest quantized part first."""
    found = {model: {row["quant"]: row for row in rows} for model, rows in models.items()}
    bits: dict[str, float] = {}
    for rows in found.values():
        for name, row in rows.items():
            if row["bits_per_value_quantized"] is not None:
                bits.setdefault(name, row["bits_per_value_quantized"])
    lines = ["", f"## {title}", "", "| cache | bits (q) | " + " | ".join(found) + " |"]
    lines += ["| --- " * (2 + len(found)) + "|"]
    for name in sorted(bits, key=bits.__getitem__):
        cells = [f"{rows[name][metric]:{form}}" if name in rows else "-" for rows in found.values()]
        lines += [f"| `{name}` | {bits[name]:.2f} | " + " | ".join(cells) + " |"]
    return [
        *lines,
        "",
        f"Bits are those of {next(iter(found))}, or of the first model that was scored with the cache.",
    ]


def _markdown(models: Mapping[str, Sequence[Row]], report: Mapping[str, Any]) -> list[str]:
    protocol = report["protocol"]
    texts = "; ".join(
        f"{text['chunks']} windows of {text['text']} from character {text['offset']} (sha256 {text['sha256'][:12]})"
        for text in report["texts"]
    )
    lines = ["# Caches scored through the stored history", "", "![pareto](pareto.png)", "![curves](curves.png)", ""]
    lines += [
        f"Windows of {protocol['context']} tokens, prefill {protocol['prefill']}, then steps of {protocol['step']}; "
        f"{protocol['dtype']}, attention `{protocol['attention']}`. {texts}.",
        "",
        "`bits` count everything that the cache of a 16-bit model holds, `(q)` the part stored as codes. Intervals "
        "are 95 % bootstrap intervals over windows. `diverges` is the median number of equal greedy tokens.",
    ]
    if len(models) > 1:
        for metric, title, form in SUMMARIES:
            lines += _summary(models, metric, title, form)
    for model, rows in models.items():
        lines += ["", f"## {model}", ""]
        lines += ["| cache | bits | bits (q) | perplexity | ratio [95 %] | KL [95 %] | top-1 [95 %] | diverges |"]
        lines += ["| --- " * 8 + "|"]
        lines += [_markdown_row(row) for row in rows]
    for line in dict.fromkeys(map(environment_line, environments_of(report))):
        lines += ["", line]
    return [*lines, ""]


def _markdown_row(row: Row) -> str:
    quantized, intervals = row["bits_per_value_quantized"], row["intervals"]
    cells = (
        f"`{row['quant']}`",
        f"{row['bits_per_value']:.2f}",
        "-" if quantized is None else f"{quantized:.2f}",
        f"{row['perplexity']:.3f}",
        f"{row['ratio']:.4f} [{_interval(intervals['ratio'], '.4f')}]",
        f"{row['kl']:.5f} [{_interval(intervals['kl'], '.5f')}]",
        f"{row['top1']:.3f} [{_interval(intervals['top1'], '.3f')}]",
        _diverges(row["first_divergence"]),
    )
    return "| " + " | ".join(cells) + " |"
