"""What is measured of attention, and how windows of text add up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measure:
    """One quantity by layer and head.

    Attributes:
        title: For tables and plots.
        definition: What it is, in one sentence.
        is_relative: A ratio of Frobenius norms, `sqrt(Σ error² / Σ norm²)`; otherwise a mean, `Σ value / Σ count`.
    """

    title: str
    definition: str
    is_relative: bool = True


ERRORS: dict[str, Measure] = {
    "key_error": Measure("keys", "‖K - K̂‖ / ‖K‖ over the tokens that are held as codes at the end"),
    "score_error": Measure("scores", "‖S - Ŝ‖ / ‖S‖ of S = q·Kᵀ·scale over the tokens a query sees, before softmax"),
    "probability_error": Measure("probabilities", "‖A - Â‖ / ‖A‖ of A = softmax(S)"),
    "attention_kl": Measure("KL of probabilities", "KL(A || Â) in nats, mean over queries", is_relative=False),
    "value_error": Measure("values", "‖V - V̂‖ / ‖V‖ over the tokens that are held as codes at the end"),
    "output_error_from_keys": Measure("output, keys alone", "‖A·V - Â·V‖ / ‖A·V‖"),
    "output_error_from_values": Measure("output, values alone", "‖A·V - A·V̂‖ / ‖A·V‖"),
    "output_error": Measure("output", "‖A·V - Â·V̂‖ / ‖A·V‖, keys and values as stored"),
}
"""Errors that a cache setting causes. Key and value errors are by key/value head, the others by query head."""

FACTS: dict[str, Measure] = {
    "negligible": Measure(
        "negligible tokens",
        "attention sparsity: share of the tokens a query sees that the fewest tokens with 95 % of its probability "
        "leave out, mean over queries",
        is_relative=False,
    ),
    "first_token": Measure("first token", "probability on the first token, mean over queries", is_relative=False),
    "outliers_pre": Measure(
        "key outliers before RoPE",
        "mean |K| of the largest channel over that of the median channel, before the rotary embedding",
        is_relative=False,
    ),
    "outliers_post": Measure(
        "key outliers after RoPE", "the same after the rotary embedding, as attention reads keys", is_relative=False
    ),
}
"""Properties of exact attention, the same for every setting."""

MEASURES = ERRORS | FACTS


@dataclass(frozen=True)
class HeadSums:
    """Sums of several measures over one window or more, by layer and head.

    Attributes:
        layers: Indices of the layers.
        error: Sum of squared errors (of values, for means) by measure, `[layers][heads]`.
        norm: Sum of squared norms (counts, for means), likewise.
    """

    layers: tuple[int, ...]
    error: Mapping[str, Sequence[Sequence[float]]]
    norm: Mapping[str, Sequence[Sequence[float]]]

    def values(self, name: str) -> list[list[float]]:
        """A measure by layer and head; NaN where there is nothing to relate an error to."""
        root = math.sqrt if MEASURES[name].is_relative else float
        return [
            [root(error / norm) if norm else math.nan for error, norm in zip(errors, norms, strict=True)]
            for errors, norms in zip(self.error[name], self.norm[name], strict=True)
        ]

    def by_layer(self, name: str) -> list[float]:
        """Mean over the heads of each layer."""
        return [sum(row) / len(row) for row in self.values(name)]

    def mean(self, name: str) -> float:
        """Mean over heads and layers."""
        rows = self.by_layer(name)
        return sum(rows) / len(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` takes them."""
        return {"layers": list(self.layers), "error": dict(self.error), "norm": dict(self.norm)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "HeadSums":
        """The sums that `to_dict` described."""
        return cls(tuple(plain["layers"]), plain["error"], plain["norm"])

    @classmethod
    def of_layers(cls, layers: Mapping[int, Mapping[str, tuple[list[float], list[float]]]]) -> "HeadSums":
        """Sums of one window from `(error, norm)` pairs `[heads]` by layer and measure."""
        names = list(next(iter(layers.values())))
        parts = [{name: [found[name][part] for found in layers.values()] for name in names} for part in (0, 1)]
        return cls(tuple(layers), parts[0], parts[1])

    @classmethod
    def total(cls, windows: Sequence["HeadSums"]) -> "HeadSums":
        """The sums of several windows of one model together."""

        def added(part: str, name: str) -> list[list[float]]:
            grids = [getattr(window, part)[name] for window in windows]
            return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]

        first = windows[0]
        names = list(first.error)
        return cls(
            first.layers, {name: added("error", name) for name in names}, {name: added("norm", name) for name in names}
        )
