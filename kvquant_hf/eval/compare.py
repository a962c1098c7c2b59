"""Comparing runs sample by sample: which answers changed, and whether the difference is more than chance.

Two caches answer the same questions, so their results are paired; a difference that the two standard errors would hide
can still be significant, and equal accuracies can hide that every text changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import median
from typing import Any

from kvquant_hf.eval.runs import CacheRun, Key, is_measured
from kvquant_hf.eval.statistics import Interval, mcnemar, mean_interval

# Besides the cache, runs may differ in these; a difference is told, not refused.
_MAY_DIFFER = ("name", "quant", "versions", "device", "max_batch_size")
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Comparison:
    """One metric of one task, a run against its baseline.

    Attributes:
        task: Name of the task.
        metric: Name of the metric.
        filter: Name of lm-eval's answer filter.
        samples: Pairs compared.
        baseline: Mean of the baseline.
        value: Mean of the other run.
        difference: `value - baseline`.
        interval: 95 % bootstrap interval of the difference over samples, `None` for fewer than two.
        better: Samples whose metric rose (for a 0/1 metric: flips from wrong to right).
        worse: Samples whose metric fell.
        p_value: Exact McNemar test on these two counts; for graded metrics this is the sign test.
        same_output: Share of samples with the same text (or log-likelihoods).
        first_divergence: Median number of equal characters before the first difference, over texts that differ;
            `None` where none does or answers are no texts.
    """

    task: str
    metric: str
    filter: str
    samples: int
    baseline: float
    value: float
    difference: float
    interval: Interval | None
    better: int
    worse: int
    p_value: float
    same_output: float
    first_divergence: float | None

    @property
    def is_significant(self) -> bool:
        """Whether the test rejects at 5 %."""
        return self.p_value < SIGNIFICANT

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {**asdict(self), "significant": self.is_significant}


def differences(baseline: CacheRun, run: CacheRun) -> tuple[list[str], list[str]]:
    """How the settings of two runs differ, cache aside: what forbids a comparison, and what is worth telling."""
    forbidding: list[str] = []
    notable: list[str] = []
    for name in sorted(baseline.config.keys() | run.config.keys()):
        first, second = baseline.config.get(name), run.config.get(name)
        if first == second or name in ("name", "quant"):
            continue
        text = f"`{name}`: {first!r} against {second!r}"
        (notable if name in _MAY_DIFFER else forbidding).append(text)
    return forbidding, notable


def check_comparable(baseline: CacheRun, run: CacheRun) -> list[str]:
    """What is worth telling about two runs that can be compared.

    Raises:
        ValueError: They cannot; every reason is given.
    """
    reasons, notable = differences(baseline, run)
    reasons += _sample_reasons(baseline.samples, run.samples)
    if reasons:
        raise ValueError(f"{run.name} cannot be compared with {baseline.name}: " + "; ".join(reasons) + ".")
    return notable


def _sample_reasons(first: Mapping[Key, Any], second: Mapping[Key, Any]) -> list[str]:
    if not first:
        return ["there are no samples"]
    unpaired = first.keys() ^ second.keys()
    reasons = []
    if unpaired:
        task, filtered, number = min(unpaired)
        reasons.append(
            f"{len(unpaired)} samples are in one run only, such as document {number} of {task} (filter {filtered})"
        )
    for name in _HASHES:
        changed = [key for key in first.keys() & second.keys() if first[key][name] != second[key][name]]
        if changed:
            reasons.append(f"`{name}` differs in {len(changed)} samples, such as document {min(changed)[2]}")
    return reasons


def compare(baseline: CacheRun, run: CacheRun) -> list[Comparison]:
    """All metrics of a run against a baseline.

    Raises:
        ValueError: The runs cannot be compared, see `check_comparable`.
    """
    check_comparable(baseline, run)
    groups: dict[tuple[str, str, str], list[Key]] = {}
    for key, sample in baseline.samples.items():
        for metric in sample["metrics"]:
            if is_measured(metric, sample.get(metric)):
                groups.setdefault((key[0], metric, key[1]), []).append(key)
    return [
        _compare(task, metric, filtered, [(baseline.samples[key], run.samples[key]) for key in keys])
        for (task, metric, filtered), keys in groups.items()
    ]


def _compare(task: str, metric: str, filtered: str, pairs: Sequence[tuple[Any, Any]]) -> Comparison:
    changes = [float(second[metric]) - float(first[metric]) for first, second in pairs]
    outputs = [(_output(first), _output(second)) for first, second in pairs]
    diverged = [_equal_prefix(a, b) for a, b in outputs if a != b and isinstance(a, str) and isinstance(b, str)]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    mean = sum(float(first[metric]) for first, _ in pairs) / len(pairs)
    difference = sum(changes) / len(pairs)
    return Comparison(
        task=task,
        metric=metric,
        filter=filtered,
        samples=len(pairs),
        baseline=mean,
        value=mean + difference,
        difference=difference,
        interval=mean_interval(changes),
        better=better,
        worse=worse,
        p_value=mcnemar(worse, better),
        same_output=sum(a == b for a, b in outputs) / len(pairs),
        first_divergence=float(median(diverged)) if diverged else None,
    )


def _output(sample: Mapping[str, Any]) -> Any:
    """The answer: a text where the sample has just one, else all of them."""
    answers = sample["resps"]
    while isinstance(answers, list) and len(answers) == 1:
        answers = answers[0]
    return answers


def _equal_prefix(first: str, second: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def stats_table(runs: Sequence[CacheRun]) -> str:
    """Markdown: what each cache held and how fast it was."""
    lines = ["| cache | bits per value | KV bytes, largest batch | tokens/s |", "| --- | --- | --- | --- |"]
    figures = (("bits_per_value", ".2f"), ("kv_bytes_largest_call", ","), ("new_tokens_per_s", ".2f"))
    for run in runs:
        cells = ["-" if run.stats[name] is None else format(run.stats[name], form) for name, form in figures]
        lines.append(f"| {run.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparison_table(baseline: CacheRun, compared: Sequence[tuple[CacheRun, Sequence[Comparison]]]) -> str:
    """Markdown: each metric against the baseline, and how many differences are more than chance."""
    lines = [
        f"| cache | task, metric | {baseline.name} | value | difference [95 %] | better / worse | p | same output "
        "| first divergence |",
        "| --- " * 9 + "|",
    ]
    lines += [f"| {run.name} | {_row(item)} |" for run, items in compared for item in items]
    tests = [item for _, items in compared for item in items]
    lines += ["", verdict(tests)] if tests else []
    return "\n".join(lines)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """One sentence: how many of the differences are more than chance allows."""
    count = sum(item.is_significant for item in comparisons)
    return (
        f"{count} of {len(comparisons)} differences are significant at 5 % (exact McNemar test, for graded metrics "
        "the sign test; not corrected for the number of tests). Better and worse count samples; first divergence is "
        "the median number of characters before the first difference of texts that differ."
    )


def _row(item: Comparison) -> str:
    name = f"{item.task}, {item.metric}" + (f" ({item.filter})" if item.filter != "none" else "")
    interval = "" if item.interval is None else f" [{item.interval[0]:+.3f}, {item.interval[1]:+.3f}]"
    mark = " *" if item.is_significant else ""
    divergence = "-" if item.first_divergence is None else f"{item.first_divergence:.0f}"
    cells = (
        name,
        f"{item.baseline:.3f}",
        f"{item.value:.3f}",
        f"{item.difference:+.3f}{interval}",
        f"{item.better} / {item.worse}",
        f"{item.p_value:.3f}{mark}",
        f"{item.same_output:.0%}",
        divergence,
    )
    return " | ".join(cells)
