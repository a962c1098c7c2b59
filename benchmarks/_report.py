"""What the benchmarks print and write: tables, verdicts, JSON, plots, facts about the machine."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _timing import UNDISTURBED

from kvquant_hf.eval import run_environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MEGABYTE = 1_000_000


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache() -> int | None:
    """Bytes of the largest cache the system reports, `None` where it reports none. A guest may see its host's."""
    sizes = [path.read_text(encoding="ascii").strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS), default=None)


def environment(device: torch.device | str = "cpu") -> dict[str, object]:
    """`run_environment`, and what else a time depends on: usable CPUs, last-level cache, load at the start."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        **run_environment(device),
        "usable_cpus": usable_cpus(),
        "last_level_cache_bytes": last_level_cache(),
        "load_average": load,
    }


def verdict(value: float | None, target: float | None, *, at_most: bool = False) -> str:
    """`met`, `missed`, `not measured`, or nothing where there is no target."""
    if target is None:
        return ""
    if value is None:
        return "not measured"
    return "met" if (value <= target if at_most else value >= target) else "missed"


def tally(verdicts: Sequence[str]) -> str:
    """One line that counts verdicts."""
    counts = {word: verdicts.count(word) for word in ("met", "missed", "not measured")}
    return "Targets: " + ", ".join(f"{count} {word}" for word, count in counts.items())


def number(value: float | None, digits: int = 2) -> str:
    """A number of a table, `-` for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def mark(basis: str | None) -> str:
    """What follows a figure that rests on disturbed samples."""
    return "" if basis in (None, UNDISTURBED) else " ~"


def footnotes(bases: Iterable[str | None]) -> list[str]:
    """Lines that explain the marks of a table."""
    kinds = sorted({basis for basis in bases if basis is not None and mark(basis)})
    return [f"~ too few samples without an involuntary context switch: {' or '.join(kinds)} of all"] if kinds else []


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text; all but words are set to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    words = [any(row[i][:1].isalpha() for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{c:<{w}}" if left else f"{c:>{w}}" for c, w, left in zip(cells, widths, words, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if left else "-" * (w + 1) + ":" for w, left in zip(widths, words, strict=True))
    return "\n".join([line(header), f"|{rule}|", *(line(row) for row in rows)])


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, directories included, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"Written to {path}", file=sys.stderr)


def check_plots() -> None:
    """Raise before anything is measured if no plot could be drawn afterwards.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("`--plot` needs matplotlib: run `pip install 'kvquant-hf[eval]'`.")


def save_plot(path: Path, columns: int, rows: int, draw: Callable[["Figure", Any], None]) -> None:
    """Write a plot as PNG and as SVG.

    Args:
        path: Name of both files; a suffix is replaced.
        columns: Panels side by side.
        rows: Panels one above another.
        draw: Draws into the figure and its panels, `[rows][columns]`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Times and random names inside an SVG would make every run a change.
    matplotlib.rcParams["svg.hashsalt"] = "kvquant_hf"
    figure = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained")
    draw(figure, figure.subplots(rows, columns, squeeze=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
        figure.savefig(path.with_suffix(suffix), dpi=150, metadata=metadata)
    print(f"Drawn in {path.with_suffix('.png')} and {path.with_suffix('.svg').name}", file=sys.stderr)


def context_axis(panel: Any, contexts: Sequence[int]) -> None:
    """Make the x axis of a panel one of context lengths."""
    ticks = sorted(set(contexts))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{context:,}" for context in ticks])
    panel.minorticks_off()
