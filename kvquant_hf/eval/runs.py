"""Reading the output directories of evaluation runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.artifacts import CONFIG, RESULTS, read_json, read_json_lines

Key = tuple[str, str, int]


@dataclass(frozen=True)
class CacheRun:
    """Results of one cache configuration.

    Attributes:
        name: Name of the cache in its run file.
        directory: Where it lies.
        config: Everything that decided the answers, resolved.
        results: lm-eval's results.
        samples: Samples by task, filter and document number.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    results: dict[str, Any]
    samples: dict[Key, dict[str, Any]]

    @property
    def is_quantized(self) -> bool:
        """Whether the cache stored codes."""
        return KVQuantConfig.from_dict(self.config["quant"]).is_quantized

    @property
    def stats(self) -> dict[str, Any]:
        """What the cache held and how fast it was, see `kvquant_hf.eval.calls.summarize`."""
        found: dict[str, Any] = self.results["config"]["kvquant_stats"]
        return found

    @property
    def cautions(self) -> list[str]:
        """What limits the meaning of the results."""
        found: list[str] = self.results["config"]["kvquant_cautions"]
        return found

    def metrics(self) -> dict[tuple[str, str, str], tuple[float, float | None]]:
        """Value and standard error by task, metric and filter."""
        found = {}
        for task, values in self.results["results"].items():
            for name, value in values.items():
                metric, comma, filtered = name.partition(",")
                if comma and not metric.endswith("_stderr") and is_measured(metric, value):
                    error = values.get(f"{metric}_stderr,{filtered}")
                    found[task, metric, filtered] = (float(value), error if isinstance(error, float) else None)
        return found


def is_measured(metric: str, value: object) -> bool:
    """Whether a metric has a value.

    RULER names its metrics by prompt length and gives -1 for the lengths that a sample does not have.
    """
    return isinstance(value, (int, float)) and not (metric.isdecimal() and value < 0)


def is_run(directory: Path) -> bool:
    """Whether a directory holds the complete results of one cache."""
    return (directory / RESULTS).is_file() and (directory / CONFIG).is_file()


def read_run(directory: Path) -> CacheRun:
    """Results of one cache from its output directory.

    Raises:
        FileNotFoundError: It holds none, or not all of it.
        ValueError: A file is damaged.
    """
    if not is_run(directory):
        raise FileNotFoundError(
            f"{directory} holds no results ({CONFIG} and {RESULTS}). An interrupted run is completed by its command."
        )
    config, results = read_json(directory / CONFIG), read_json(directory / RESULTS)
    samples: dict[Key, dict[str, Any]] = {}
    for path in sorted(directory.glob("samples_*.jsonl")):
        task = path.stem.removeprefix("samples_")
        for row in read_json_lines(path):
            samples[task, row["filter"], row["doc_id"]] = row
    return CacheRun(config["name"], directory, config, results, samples)


def find_runs(paths: Sequence[Path]) -> list[CacheRun]:
    """Runs in the directories given; one that holds several (the output of a run file) stands for all of them.

    The first unquantized run of an output directory comes first in it: it is the baseline of the others.

    Raises:
        FileNotFoundError: A directory holds no results.
    """
    found: list[CacheRun] = []
    for path in paths:
        if is_run(path) or not path.is_dir():
            found.append(read_run(path))
            continue
        inner = [read_run(child) for child in sorted(path.iterdir()) if child.is_dir() and is_run(child)]
        if not inner:
            raise FileNotFoundError(f"{path} holds no results, nor does a directory in it.")
        found += sorted(inner, key=lambda run: run.is_quantized)
    return found
