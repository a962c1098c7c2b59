"""Names in plots stand apart from each other and from the points."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from kvquant_hf.eval.plots import Point, curves, quality_against_size


def names_and_boxes(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    labels = [text for text in figure.axes[0].texts if isinstance(text, Annotation)]
    return figure.axes[0], {label.get_text(): label for label in labels}, canvas


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize("seed", range(4))
def test_names_of_a_crowd_cover_neither_each_other_nor_points(seed, log):
    draw = np.random.default_rng(seed)
    points = [Point(f"cache-{i}", float(draw.uniform(2, 9)), float(10 ** draw.uniform(-3, 0))) for i in range(14)]
    points += [Point(f"near-{i}", 2.5 + i / 10, 0.1 + i / 1000) for i in range(4)]
    axes, labels, canvas = names_and_boxes(quality_against_size({"model": points}, "loss", log=log))
    assert set(labels) == {point.name for point in points}
    # Without the line to the point.
    boxes = [Text.get_window_extent(label, canvas.get_renderer()) for label in labels.values()]
    for one, other in combinations(boxes, 2):
        assert not one.shrunk(0.95, 0.8).overlaps(other.shrunk(0.95, 0.8))
    for point in points:
        x, y = axes.transData.transform((point.bits, point.value))
        assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in boxes)


def test_files_are_named_by_their_last_folder():
    points = [Point("configs/groups_of_32/k4v4.yaml,key.nbits=3", 4.0, 0.1), Point("k2v2,key.promoted=0.5", 3.0, 0.2)]
    _, labels, _ = names_and_boxes(quality_against_size({"model": points}, "loss"))
    assert set(labels) == {"groups_of_32/k4v4,key.nbits=3", "k2v2,key.promoted=0.5"}


def test_a_reference_has_no_name_beside_it():
    points = [Point("dense", 16.0, 0.9, is_reference=True), Point("k4v4", 4.5, 0.8)]
    _, labels, _ = names_and_boxes(quality_against_size({"model": points}, "score"))
    assert set(labels) == {"k4v4"}


def test_a_long_name_has_a_line_for_each_setting():
    names = ["turboquant3,key.method=turboquant_prod,value.method=turboquant_prod", "k2v2,key.promoted=0.5"]
    points = [Point(name, 3.0 + i, 0.1 + i) for i, name in enumerate(names)]
    _, labels, _ = names_and_boxes(quality_against_size({"model": points}, "loss"))
    assert set(labels) == {names[0].replace(",", ",\n"), names[1]}


@pytest.mark.parametrize("count", [3, 5, 6, 24])
def test_many_names_of_curves_stand_below_the_panel_and_cover_no_line(count):
    lines = {f"configs/cache-{i}.yaml,key.group_size={i}": [1.0 + i, 2.0 + i, 3.0] for i in range(count)}
    figure = curves({"model": lines}, [1, 2, 3], "position", "loss", log=True)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()][:1] == ["configs/cache-0,key.group_size=0"]
    frame, box = axes.get_window_extent(), legend.get_window_extent(canvas.get_renderer())
    assert (box.y1 < frame.y0) == (count > 5)
    lowest = min(text.get_window_extent(canvas.get_renderer()).y0 for text in legend.get_texts())
    assert frame.height > 100 and lowest >= 0
