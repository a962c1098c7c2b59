"""Which candidate each layer and side gets, as a knapsack."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from kvquant_hf.analysis.budget import Budget, amount
from kvquant_hf.analysis.candidates import EXACT, SIDES, Candidates
from kvquant_hf.analysis.knapsack import Floats, InfeasibleError, choose
from kvquant_hf.analysis.layer_settings import allocation_config
from kvquant_hf.analysis.sizes import Pair, SizeTable
from kvquant_hf.config import KVQuantConfig

# Room left to a figure that a second solution must not make worse, relative.
_SLACK = 1e-9


@dataclass(frozen=True)
class Sensitivities:
    """Error of quantizing one layer and side alone.

    Attributes:
        errors: By side, layer and candidate; 0 for a candidate of 16 bits.
        weight: What a layer counts in the sum that predicts an allocation: 1 for the KL of predictions, one over the
            number of layers for means over layers.
    """

    errors: Mapping[str, Mapping[int, Mapping[str, float]]]
    weight: float = 1.0

    def sums(self, pairs: Mapping[int, Pair]) -> tuple[float, float]:
        """Sum of the single errors of keys and of values, by candidates of each layer."""
        totals = [
            self.weight * sum(self.errors[side][index][pair[place]] for index, pair in pairs.items())
            for place, side in enumerate(SIDES)
        ]
        return totals[0], totals[1]


@dataclass(frozen=True)
class Factors:
    """What the sums of single errors are multiplied by to predict an allocation.

    Attributes:
        key: Of keys.
        value: Of values.
    """

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True)
class Problem:
    """Everything an allocation is decided by.

    Attributes:
        budget: The limits.
        candidates: What there is to choose from.
        sizes: Sizes of all pairs of candidates.
        sensitivities: Single errors.
        frame: Settings of the cache besides keys and values.
    """

    budget: Budget
    candidates: Candidates
    sizes: SizeTable
    sensitivities: Sensitivities
    frame: KVQuantConfig
    _options: list[Pair] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_options", list(product(self.candidates.key, self.candidates.value)))

    def predicted(self, pairs: Mapping[int, Pair], factors: Factors) -> dict[str, float]:
        """Errors by name, the weighted sums of the single ones."""
        key, value = self.sensitivities.sums(pairs)
        if self.budget.kind == "attention":
            return {"key_kl": factors.key * key, "value_error": factors.value * value}
        return {"kl": factors.key * key + factors.value * value}

    def predicted_size(self, pairs: Mapping[int, Pair]) -> dict[str, float]:
        """`bits`, and `bytes` at the length that `sizes` is about."""
        return {"bits": self.sizes.bits_per_value(pairs), "bytes": float(self.sizes.memory_bytes(pairs))}

    def solve(self, factors: Factors) -> dict[int, Pair]:
        """The best allocation: candidates of keys and values by layer.

        Of several of the smallest size, the one of the least error.

        Raises:
            ValueError: The budget cannot be met; the best that can be reached is named.
        """
        errors, bits, held = self._errors(factors), self._sizes_of("bits"), self._sizes_of("memory_bytes")
        limits = np.array(list(self.budget.limits.values()))
        try:
            if self.budget.is_error:
                picks = choose([part[:, 0] for part in bits], errors, limits)
                least = sum(part[pick, 0] for part, pick in zip(bits, picks, strict=True))
                loads = [np.hstack(parts) for parts in zip(errors, bits, strict=True)]
                costs: list[Floats] = [(part / limits).sum(axis=1) for part in errors]
                picks = choose(costs, loads, np.append(limits, least * (1 + _SLACK)))
            elif self.budget.kind == "bits":
                picks = choose([part[:, 0] for part in errors], bits, limits * sum(self.sizes.values.values()))
            else:
                picks = choose([part[:, 0] for part in errors], held, limits - self.sizes.others)
        except InfeasibleError as error:
            raise ValueError(self._refusal(error, factors)) from error
        return {index: self._options[pick] for index, pick in zip(self.sizes.layers, picks, strict=True)}

    def _errors(self, factors: Factors) -> list[Floats]:
        """`[options, errors]` of each layer."""
        parts = []
        for index in self.sizes.layers:
            single = [self.predicted({index: pair}, factors) for pair in self._options]
            parts.append(np.array([list(errors.values()) for errors in single]))
        return parts

    def _sizes_of(self, name: str) -> list[Floats]:
        """`[options, 1]` of each layer."""
        return [
            np.array([[float(getattr(self.sizes.pair(index, *pair), name))] for pair in self._options])
            for index in self.sizes.layers
        ]

    def _refusal(self, error: InfeasibleError, factors: Factors) -> str:
        name = list(self.budget.limits)[error.load or 0]
        least = error.least
        if self.budget.kind == "bits":
            least /= sum(self.sizes.values.values())
        elif self.budget.kind == "bytes":
            least += self.sizes.others
        corrected = "" if factors == Factors() else ", its prediction corrected by a measured run"
        how = f"the least predicted error{corrected}" if self.budget.is_error else "the smallest size"
        return (
            f"`{name}` must be at least {amount(name, _rounded_up(least))}, {how} that these candidates can reach; "
            f"got {amount(name, self.budget.limits[name])}."
        )

    def uniform(self, factors: Factors) -> dict[int, Pair] | None:
        """The best allocation with the same candidates in all layers, `None` where none is within the budget."""
        best: tuple[tuple[float, ...], dict[int, Pair]] | None = None
        for pair in self._options:
            pairs = dict.fromkeys(self.sizes.layers, pair)
            errors = self.predicted(pairs, factors)
            known = errors | self.predicted_size(pairs)
            if any(known[name] > limit * (1 + _SLACK) for name, limit in self.budget.limits.items()):
                continue
            size = known["bytes" if self.budget.kind == "bytes" else "bits"]
            rank = (size, *errors.values()) if self.budget.is_error else (*errors.values(), size)
            if best is None or rank < best[0]:
                best = rank, pairs
        return None if best is None else best[1]

    def config(self, pairs: Mapping[int, Pair]) -> KVQuantConfig:
        """An allocation as settings of a cache."""
        key, value = self.candidates.key, self.candidates.value
        return allocation_config(self.frame, {index: (key[pair[0]], value[pair[1]]) for index, pair in pairs.items()})

    def one_side(self, pairs: Mapping[int, Pair], side: str) -> KVQuantConfig:
        """Settings that quantize one side as an allocation does, and leave the other exact."""
        place = SIDES.index(side)
        specs = {index: self.candidates.of(side)[pair[place]] for index, pair in pairs.items()}
        return allocation_config(
            self.frame, {index: (spec, EXACT) if place == 0 else (EXACT, spec) for index, spec in specs.items()}
        )


def _rounded_up(value: float) -> float:
    """The next number of four digits, so that the best that is named is a budget that can be met; integers as is."""
    if value >= 1000 or value <= 0:
        return value
    digits = 10.0 ** (3 - math.floor(math.log10(value)))
    return math.ceil(round(value * digits, 6)) / digits
