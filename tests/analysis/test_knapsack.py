"""The exact solver against brute force."""

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf.analysis import knapsack
from kvquant_hf.analysis.knapsack import InfeasibleError, choose

NUMBERS = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.integers(1, 40).map(float))


@st.composite
def instances(draw):
    """Up to six groups of up to four options, one load or two, limits from hopeless to generous."""
    groups = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    count = draw(st.integers(1, 2))
    costs = [np.array([draw(NUMBERS) for _ in range(n)]) for n in groups]
    loads = [np.array([[draw(NUMBERS) for _ in range(count)] for _ in range(n)]) for n in groups]
    least = sum(part.min(0) for part in loads)
    most = sum(part.max(0) for part in loads)
    share = np.array([draw(st.floats(-0.05, 1.0)) for _ in range(count)])
    return costs, loads, np.maximum(least + share * (most - least), 0.0)


def brute_force(costs, loads, limits):
    best = None
    for picks in product(*(range(len(part)) for part in costs)):
        load = sum(part[pick] for part, pick in zip(loads, picks, strict=True))
        cost = sum(part[pick] for part, pick in zip(costs, picks, strict=True))
        if (load <= limits * (1 + 1e-12)).all() and (best is None or cost < best):
            best = cost
    return best


@settings(max_examples=150, deadline=None)
@given(instances())
def test_least_cost_within_the_limits(instance):
    costs, loads, limits = instance
    best = brute_force(costs, loads, limits)
    try:
        picks = choose(costs, loads, limits)
    except InfeasibleError as error:
        assert best is None
        if error.load is not None:
            assert error.least == pytest.approx(sum(part[:, error.load].min() for part in loads))
            assert error.least > limits[error.load]
        return
    load = sum(part[pick] for part, pick in zip(loads, picks, strict=True))
    assert (load <= limits * (1 + 1e-8)).all()
    if best is not None:  # rounding may let the solver in where brute force just stays out
        assert sum(part[pick] for part, pick in zip(costs, picks, strict=True)) <= best * (1 + 1e-9) + 1e-12


def test_costs_of_all_sizes_are_told_apart():
    # The choice that matters differs in the seventh digit of the largest cost.
    costs = [np.array([1.0, 0.5]), np.array([3e-7, 2e-7, 1e-7])]
    loads = [np.array([[1.0], [2.0]]), np.array([[1.0], [2.0], [3.0]])]
    assert choose(costs, loads, np.array([4.0])) == [1, 1]
    assert choose(costs, loads, np.array([5.0])) == [1, 2]
    assert choose(costs, loads, np.array([2.0])) == [0, 0]


def test_a_limit_that_the_solver_overlooks_is_kept(monkeypatch):
    real, seen = knapsack._solve, []

    def careless(costs, loads, limits, least, refused):
        seen.append([list(picks) for picks in refused])
        return real(costs, loads, limits + 1.5 * (len(refused) < 2), least, refused)

    monkeypatch.setattr(knapsack, "_solve", careless)
    costs, loads = [np.array([2.0, 1.0])] * 2, [np.array([[1.0], [2.0]])] * 2
    picks = choose(costs, loads, np.array([2.5]))
    assert picks == [0, 0] and len(seen) == 3 and len(seen[2]) == 2 and seen[2][0] != seen[2][1]


def test_thirty_layers_are_solved_soon():
    generator = np.random.default_rng(0)
    costs = [generator.random(32) for _ in range(30)]
    loads = [generator.integers(20, 200, size=(32, 1)).astype(float) for _ in range(30)]
    start = time.process_time()  # not of the clock: other processes may have the processor
    picks = choose(costs, loads, np.array([30 * 80.0]))
    assert time.process_time() - start < 20  # usually a tenth of a second
    assert sum(part[pick, 0] for part, pick in zip(loads, picks, strict=True)) <= 30 * 80


@pytest.mark.parametrize(
    ("costs", "loads", "limit"), [([np.nan], [[1.0]], 1.0), ([1.0], [[-1.0]], 1.0), ([1.0], [[1.0]], np.inf)]
)
def test_refuses(costs, loads, limit):
    with pytest.raises(ValueError, match="must be finite"):
        choose([np.array(costs)], [np.array(loads)], np.array([limit]))
