"""Names beside the points of a plot, out of each other's way."""

from collections.abc import Sequence
from itertools import product

from matplotlib.axes import Axes

_FONT_SIZE = 7.0
# A box around a name, in points: width of a letter and height of a line, as shares of the font size.
_LETTER, _LINE = 0.58, 1.25
# Letters of a name beyond which each of its settings has a line of its own.
_LONG = 32
# Distances from the point at which a name may stand, in points, nearest first; those far away get a line to the point.
_STEPS = (0.0, 9.0, -9.0, 18.0, -18.0, 27.0, -27.0, 38.0, -38.0, 50.0, -50.0)
_GAP, _RADIUS, _FAR = 5.0, 3.0, 12.0

# Left, bottom, right and top, in points.
_Box = tuple[float, float, float, float]


def place_labels(ax: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Write names beside points, each where it covers no point and no other name, if there is such a place.

    Scales and limits of the axes must be set before. Places are tried at the right and at the left of the point, level
    with it first and then higher and lower; where all are taken, the first one is.

    Args:
        ax: The axes.
        points: Name and coordinates of each point.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # settles the layout, and with it where points lie
    to_points = 72.0 / figure.dpi
    centers = [ax.transData.transform((x, y)) * to_points for _, x, y in points]
    frame = ax.get_window_extent()
    limits = (frame.x0 * to_points, frame.x1 * to_points)
    taken: list[_Box] = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in centers]
    for (name, x, y), (left, level) in zip(points, centers, strict=True):
        lines = name.replace(",", ",\n").split("\n") if len(name) > _LONG else [name]
        width, height = _LETTER * _FONT_SIZE * max(map(len, lines)), _LINE * _FONT_SIZE * len(lines)
        places = [
            (left + _GAP if right else left - _GAP - width, level + step - height / 2)
            for step, right in product(_STEPS, (True, False))
        ]
        boxes = [(at, low, at + width, low + height) for at, low in places]
        inside = [box for box in boxes if box[0] >= limits[0] and box[2] <= limits[1]] or boxes[:1]
        box = next((box for box in inside if not any(_overlap(box, other) for other in taken)), inside[0])
        taken.append(box)
        offset = (box[0] - left, (box[1] + box[3]) / 2 - level)
        far = abs(offset[1]) > _FAR
        ax.annotate(
            "\n".join(lines),
            (x, y),
            textcoords="offset points",
            xytext=offset,
            fontsize=_FONT_SIZE,
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "grey", "shrinkB": _RADIUS} if far else None,
        )


def _overlap(first: _Box, second: _Box) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]
