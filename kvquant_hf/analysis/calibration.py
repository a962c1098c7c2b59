"""Finding the allocation of a budget: predict, solve, measure, correct.

The error of an allocation is predicted as the sum of the errors of its layers and sides alone. The sum is the first
term of the error of independent perturbations, and leaves out that a later layer works on what earlier ones changed.
Each solution is therefore measured, and where the prediction missed, the sums of keys and of values get factors that
would have made it right, and the problem is solved again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvquant_hf.analysis.allocation import Factors, Problem, Sensitivities
from kvquant_hf.analysis.budget import Budget
from kvquant_hf.analysis.candidates import SIDES, Candidates
from kvquant_hf.analysis.meter import Meter
from kvquant_hf.analysis.sizes import Pair, SizeTable
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.score import REFERENCE, Score

TOLERANCE = 0.2
ROUNDS = 4
ALLOCATION = "allocation"
UNIFORM = "uniform"


@dataclass(frozen=True)
class Round:
    """One solution of the problem, and what became of it.

    Attributes:
        pairs: Candidates of keys and values by layer.
        factors: Those it was solved with.
        predicted: Errors by name.
        predicted_size: Sizes by name.
        measured: Errors by name, measured together.
        measured_size: Sizes by name, of a real cache.
        sides: KL of predictions with the keys of the allocation alone quantized and with its values alone; `None`
            where keys and values have errors of their own.
        is_met: Whether the measured figures are within the budget.
    """

    pairs: Mapping[int, Pair]
    factors: Factors
    predicted: Mapping[str, float]
    predicted_size: Mapping[str, float]
    measured: Mapping[str, float]
    measured_size: Mapping[str, float]
    sides: tuple[float, float] | None
    is_met: bool

    @property
    def miss(self) -> float:
        """Largest relative difference of a measured error from the predicted one."""
        return max(_miss(self.measured[name], value) for name, value in self.predicted.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "pairs": {str(index): list(pair) for index, pair in self.pairs.items()},
            "factors": {"key": self.factors.key, "value": self.factors.value},
            "predicted": {**self.predicted, **self.predicted_size},
            "measured": {**self.measured, **self.measured_size},
            "sides_alone": None if self.sides is None else dict(zip(SIDES, self.sides, strict=True)),
            "miss": self.miss,
            "is_met": self.is_met,
        }


@dataclass(frozen=True)
class Calibration:
    """The answer to a budget.

    Attributes:
        problem: What was solved.
        rounds: All solutions, in order.
        chosen: Index of the round whose allocation is the answer.
        outcome: Why there are no more rounds.
        uniform: The best allocation with the same candidates in all layers, predicted with the factors of the answer
            and measured; `None` where none is within the budget.
        scores: Scores of predictions under `ALLOCATION`, `UNIFORM` and `REFERENCE`, on the text calibrated on.
        held_out: The same on other text; empty where there is none.
    """

    problem: Problem
    rounds: Sequence[Round]
    chosen: int
    outcome: str
    uniform: Round | None
    scores: Mapping[str, Score]
    held_out: Mapping[str, Score]

    @property
    def answer(self) -> Round:
        """The round whose allocation is the answer."""
        return self.rounds[self.chosen]

    @property
    def config(self) -> KVQuantConfig:
        """The answer as settings of a cache."""
        return self.problem.config(self.answer.pairs)

    @property
    def rows(self) -> dict[str, Round]:
        """Answer and uniform allocation by name."""
        return {ALLOCATION: self.answer} | ({} if self.uniform is None else {UNIFORM: self.uniform})


def calibrate(meter: Meter, budget: Budget, candidates: Candidates, most_rounds: int = ROUNDS) -> Calibration:
    """Find the allocation that meets a budget best, and measure it.

    Args:
        meter: Model, text and protocol.
        budget: What may be spent.
        candidates: What each layer and side may get.
        most_rounds: Solutions at most.

    Raises:
        ValueError: The budget cannot be met (the best that can be reached is named), or an argument is not allowed.
    """
    if most_rounds < 1:
        raise ValueError(f"`most_rounds` must be an integer >= 1, got {most_rounds!r}.")
    sizes = SizeTable(meter.model, meter.frame, candidates, budget.context_length or meter.protocol.context)
    nothing = {side: {index: dict.fromkeys(candidates.of(side), 0.0) for index in sizes.layers} for side in SIDES}
    problem = Problem(budget, candidates, sizes, Sensitivities(nothing), meter.frame)
    if not budget.is_error:
        problem.solve(Factors())  # a size that cannot be reached is refused before hours of measuring
    sensitivities = meter.sensitivities(candidates, of_attention=budget.kind == "attention")
    problem = replace(problem, sensitivities=sensitivities)
    rounds, outcome = _rounds(meter, problem, most_rounds)
    chosen = min(range(len(rounds)), key=lambda i: _rank(budget, rounds[i]))
    factors = _corrected(problem, rounds[chosen])
    uniform = problem.uniform(factors)
    found = None if uniform is None else _measured(meter, problem, uniform, factors)
    configs = {ALLOCATION: problem.config(rounds[chosen].pairs)}
    if uniform is not None:
        configs[UNIFORM] = problem.config(uniform)
    scores = meter.scores(configs)
    held_out = meter.scores(configs, held_out=True) if len(meter.held_out) else {}
    return Calibration(problem, tuple(rounds), chosen, outcome, found, scores, held_out)


def _rounds(meter: Meter, problem: Problem, most_rounds: int) -> tuple[list[Round], str]:
    """Solutions, each with a better prediction than the one before, and why they end."""
    rounds: list[Round] = []
    factors = Factors()
    while True:
        try:
            pairs = problem.solve(factors)
        except ValueError:
            if any(done.is_met for done in rounds):
                return rounds, "the corrected prediction allows no allocation, one that was measured does"
            raise
        if any(dict(done.pairs) == pairs for done in rounds):
            return rounds, "the corrected prediction gives an allocation that was measured already"
        rounds.append(_measured(meter, problem, pairs, factors))
        if rounds[-1].miss <= TOLERANCE and rounds[-1].is_met:
            return rounds, f"the prediction is within {TOLERANCE:.0%} of the measured error"
        if len(rounds) == most_rounds:
            return rounds, f"no more rounds than {most_rounds} were allowed"
        factors = _corrected(problem, rounds[-1])


def _measured(meter: Meter, problem: Problem, pairs: Mapping[int, Pair], factors: Factors) -> Round:
    config, sides = problem.config(pairs), None
    if problem.budget.kind == "attention":
        errors = meter.attention_errors(config)
    else:
        whole = "the allocation"
        parts = {side: problem.one_side(pairs, side) for side in SIDES}
        scores = meter.scores({whole: config} | {f"its {side}s alone": part for side, part in parts.items()})
        errors = {"kl": max(0.0, scores[whole].kl)}
        key, value = (max(0.0, scores[f"its {side}s alone"].kl) for side in SIDES)
        sides = (key, value)
    sizes = {
        "bits": problem.sizes.measured_bits(config),
        "bytes": float(problem.sizes.measured_bytes(config)),
    }
    found = errors | sizes
    is_met = all(found[name] <= limit * (1 + 1e-9) for name, limit in problem.budget.limits.items())
    return Round(
        pairs, factors, problem.predicted(pairs, factors), problem.predicted_size(pairs), errors, sizes, sides, is_met
    )


def _corrected(problem: Problem, done: Round) -> Factors:
    """Factors that would have made the prediction of a round right.

    With one error for keys and values together, each side gets what it was worth alone, and both what they were worth
    together.
    """
    key, value = problem.sensitivities.sums(done.pairs)
    if done.sides is None:
        return Factors(_ratio(done.measured["key_kl"], key), _ratio(done.measured["value_error"], value))
    together = _ratio(done.measured["kl"], sum(done.sides))
    return Factors(_ratio(done.sides[0], key) * together, _ratio(done.sides[1], value) * together)


def _rank(budget: Budget, done: Round) -> tuple[float, ...]:
    """Sorts the best first: met before missed, then the smallest size (of error budgets) or error."""
    figures = {**done.measured, **done.measured_size}
    excess = max(figures[name] / limit for name, limit in budget.limits.items())
    if not done.is_met:
        return (1.0, excess)
    errors = tuple(done.measured.values())
    return (0.0, done.measured_size["bits"], *errors) if budget.is_error else (0.0, *errors)


def _ratio(measured: float, predicted: float) -> float:
    """1 where there is nothing to correct."""
    return measured / predicted if predicted > 0 and measured > 0 else 1.0


def _miss(measured: float, predicted: float) -> float:
    if measured == predicted:
        return 0.0
    return abs(measured / predicted - 1) if predicted else math.inf


__all__ = ["ALLOCATION", "REFERENCE", "UNIFORM", "Calibration", "Round", "calibrate"]
