"""Figures of reports, each as PNG and SVG. Needs matplotlib (the `eval` extra)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvquant_hf.eval.labels import place_labels
from kvquant_hf.eval.statistics import Interval

# Drawn without `pyplot`: no backend is chosen and no global figure list is kept for the program that calls this.
_STYLE: Any = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "kvquant_hf",
    "svg.fonttype": "path",
}
_PANEL, _LARGE_PANEL = (4.6, 3.4), (7.0, 5.0)
_CROWD = 8  # points of a panel from which on it is a large one
_LINES, _LINE_HEIGHT = 5, 0.18  # names that a legend holds within its panel, and inches of one below it
_COLOURS, _LINE_STYLES = 10, ("-", "--", ":")  # of matplotlib's own cycle
_DECADES = 30  # largest over smallest value beyond which `dots` turns to a logarithmic scale


@dataclass(frozen=True)
class Point:
    """One cache in a plot of quality against size.

    Attributes:
        name: Written beside it.
        bits: Bits per value.
        value: Its quality.
        interval: Interval of `value`, if there is one.
        is_reference: Drawn as a horizontal line instead, the value to be kept.
    """

    name: str
    bits: float
    value: float
    interval: Interval | None = None
    is_reference: bool = False


def save(figure: Figure, base: Path) -> list[Path]:
    """Write a figure as `base.png` and `base.svg`.

    Returns:
        The two paths, the PNG first.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    paths = [base.with_name(f"{base.name}.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context(_STYLE):
        figure.savefig(paths[0], dpi=150, bbox_inches="tight")
        figure.savefig(paths[1], bbox_inches="tight", metadata={"Date": None})
    return paths


def _panels(count: int, columns: int = 3, size: tuple[float, float] = _PANEL) -> tuple[Figure, list[Axes]]:
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def quality_against_size(
    panels: Mapping[str, Sequence[Point]], label: str, log: bool = False, front: bool = False
) -> Figure:
    """A panel for each title: bits per value to the right, quality upwards.

    Args:
        panels: Points by title.
        label: Of the vertical axis.
        log: Logarithmic quality; points at zero are left out, since they have no place on it.
        front: Join the points of which none other is both smaller and lower (the Pareto front, lower being better).
    """
    with matplotlib.rc_context(_STYLE):
        crowded = max(map(len, panels.values()), default=0) > _CROWD
        figure, axes = _panels(len(panels), columns=2 if crowded else 3, size=_LARGE_PANEL if crowded else _PANEL)
        shown = [[point for point in points if point.value > 0 or not log] for points in panels.values()]
        looks = _looks(point.name for points in panels.values() for point in points)
        for ax, title, points in zip(axes, panels, shown, strict=True):
            if log:
                ax.set_yscale("log")
            _draw_points(ax, points, looks)
            ax.set(title=title, xlabel="bits per value", ylabel=label)
            if front:
                best = pareto_front([(point.bits, point.value) for point in points])
                ax.plot([size for size, _ in best], [loss for _, loss in best], color="grey", linewidth=1, zorder=0)
        for ax, points in zip(axes, shown, strict=True):
            place_labels(ax, [(_short(p.name), p.bits, p.value) for p in points if not p.is_reference])
    return figure


def _short(name: str) -> str:
    """A name without the ending of a file and without folders but the last."""
    path, comma, settings = name.partition(",")
    parts = path.removesuffix(".yaml").split("/")
    return "/".join(parts[-2:]) + comma + settings


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points `(size, loss)` of which none other is at most as large and loses less, by size."""
    front: list[tuple[float, float]] = []
    for size, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((size, loss))
    return front


def _looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and line style by name, the same in all panels; styles tell names of one colour apart."""
    return {
        name: (f"C{place % _COLOURS}", _LINE_STYLES[place // _COLOURS % len(_LINE_STYLES)])
        for place, name in enumerate(dict.fromkeys(names))
    }


def _draw_points(ax: Axes, points: Sequence[Point], looks: Mapping[str, tuple[str, str]]) -> None:
    for point in points:
        if point.is_reference:
            ax.axhline(point.value, color="black", linewidth=1, linestyle="--", label=point.name)
            if point.interval is not None:
                ax.axhspan(*point.interval, color="black", alpha=0.08)
            continue
        low, high = point.interval or (point.value, point.value)
        errors = [[max(point.value - low, 0.0)], [max(high - point.value, 0.0)]]
        colour, _ = looks[point.name]
        ax.errorbar(point.bits, point.value, yerr=errors, fmt="o", color=colour, markersize=4, capsize=2, linewidth=1)
    ax.margins(x=0.2, y=0.15)  # room for the names
    if any(point.is_reference for point in points):
        ax.legend(fontsize=7)


def heat_maps(
    panels: Mapping[str, Mapping[tuple[float, float], float]], xlabel: str, ylabel: str, label: str
) -> Figure:
    """A grid of values from 0 to 1 for each title.

    Args:
        panels: Values by `(x, y)`, by title.
        xlabel: What `x` is.
        ylabel: What `y` is.
        label: What the values are.
    """
    with matplotlib.rc_context({**_STYLE, "axes.grid": False}):
        figure, axes = _panels(len(panels))
        image = None
        for ax, (title, cells) in zip(axes, panels.items(), strict=True):
            xs, ys = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
            grid = [[cells.get((x, y), float("nan")) for x in xs] for y in ys]
            image = ax.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
            ax.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
            ax.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        if image is not None:
            figure.colorbar(image, ax=axes, label=label)
    return figure


def curves(
    panels: Mapping[str, Mapping[str, Sequence[float]]], xs: Sequence[float], xlabel: str, ylabel: str, log: bool
) -> Figure:
    """A line for each name in a panel for each title.

    Args:
        panels: Values by name, as many as `xs`, by title.
        xs: Where they lie.
        xlabel: What `xs` are.
        ylabel: What the values are.
        log: Logarithmic values.
    """
    most = max(map(len, panels.values()), default=0)
    below = most > _LINES
    size = (_LARGE_PANEL[0], _PANEL[1] + _LINE_HEIGHT * (most + 3)) if below else _PANEL
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(len(panels), columns=2 if below else 3, size=size)
        looks = _looks(name for lines in panels.values() for name in lines)
        for ax, (title, lines) in zip(axes, panels.items(), strict=True):
            for name, values in lines.items():
                colour, style = looks[name]
                ax.plot(xs, values, color=colour, linestyle=style, marker=".", linewidth=1, label=_short(name))
            ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
            if log and any(value > 0 for values in lines.values() for value in values):
                ax.set_yscale("log")
            if lines and below:
                ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
            elif lines:
                ax.legend(fontsize=7)
    return figure


def dots(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """A row for each name, a dot for each series; a logarithmic scale where values differ widely.

    Args:
        panels: Values by name, by series, by title. Values that are not above zero are left out.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(len(panels))
        for ax, (title, series) in zip(axes, panels.items(), strict=True):
            names = list(dict.fromkeys(name for values in series.values() for name in values))
            for label, values in series.items():
                points = [(value, names.index(name)) for name, value in values.items() if value > 0]
                ax.plot([x for x, _ in points], [y for _, y in points], "o", markersize=6, alpha=0.8, label=label)
            ax.set(title=title, ylim=(len(names) - 0.5, -0.5))  # the first name on top
            ax.set_yticks(range(len(names)), names)
            drawn = [value for values in series.values() for value in values.values() if value > 0]
            ax.margins(x=0.1)
            if drawn and max(drawn) > _DECADES * min(drawn):
                ax.set_xscale("log")
            else:
                ax.set_xlim(left=0)
        if axes:
            axes[0].legend(fontsize=7)
    return figure


def head_maps(panels: Mapping[str, Sequence[Sequence[float]]], label: str) -> Figure:
    """Layers downwards, heads to the right, one logarithmic colour scale for all panels.

    Args:
        panels: Values by layer and head, by title; layers may differ in heads.
        label: What the values are.
    """
    values = [value for rows in panels.values() for row in rows for value in row if value > 0]
    norm = LogNorm(min(values), max(values)) if values and min(values) < max(values) else None
    with matplotlib.rc_context({**_STYLE, "axes.grid": False}):
        figure, axes = _panels(len(panels))
        image = None
        for ax, (title, rows) in zip(axes, panels.items(), strict=True):
            width = max(len(row) for row in rows)
            grid = np.full((len(rows), width), np.nan)
            for place, row in enumerate(rows):
                grid[place, : len(row)] = row
            image = ax.imshow(grid, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
            ax.set(title=title, xlabel="head", ylabel="quantized layer")
        if image is not None:
            figure.colorbar(image, ax=axes, label=label)
    return figure
