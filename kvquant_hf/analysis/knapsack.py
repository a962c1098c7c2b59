"""The multiple-choice knapsack: one option of each group, least cost, total loads within limits. Solved exactly.

Kellerer, Pferschy and Pisinger, "Knapsack Problems" (2004), chapter 11; here as a mixed-integer linear program that
scipy's HiGHS solves to optimality. Needs scipy (the `eval` extra).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# HiGHS takes rows and objectives that are off by 1e-6 for satisfied and for equal; numbers of this size make that
# a relative error of 1e-11.
_SCALE = 1e5
_EXACT = 1e-9
_RETRIES = 50
_NOTHING = 1e-200  # what lies below cannot be scaled up


class InfeasibleError(ValueError):
    """No choice stays within the limits.

    Attributes:
        load: Index of the load that cannot, `None` where each could but not all at once.
        least: The least that it can be.
    """

    def __init__(self, load: int | None, least: float, limit: float) -> None:
        what = "the loads cannot all be within their limits at once."
        super().__init__(
            what if load is None else f"load {load} must be at most {limit:g}, at least {least:g} is needed."
        )
        self.load = load
        self.least = least


def choose(costs: Sequence[Floats], loads: Sequence[Floats], limits: Floats) -> list[int]:
    """The option of each group with the least total cost whose total loads are within the limits.

    Args:
        costs: `[n_g]` of each group, its options' costs.
        loads: `[n_g, M]` of each group, its options' loads, none negative.
        limits: `[M]`, greatest total of each load.

    Returns:
        Index of the option of each group.

    Raises:
        InfeasibleError: A load is above its limit even with the lightest options, or all together are.
        ValueError: A number is not finite, or a load is negative.
        RuntimeError: The solver did not finish.
    """
    if not all(np.isfinite(part).all() for part in (*costs, *loads, limits)) or any(
        (part < 0).any() for part in loads
    ):
        raise ValueError("`costs`, `loads` and `limits` must be finite and `loads` not negative.")
    least = np.sum([part.min(axis=0) for part in loads], axis=0)
    for load, limit in enumerate(limits):
        if least[load] > limit * (1 + _EXACT):
            raise InfeasibleError(load, float(least[load]), float(limit))
    kept = [_undominated(cost, load) for cost, load in zip(costs, loads, strict=True)]
    few_costs = [cost[rows] for cost, rows in zip(costs, kept, strict=True)]
    few_loads = [load[rows] for load, rows in zip(loads, kept, strict=True)]
    refused: list[list[int]] = []
    while len(refused) < _RETRIES:
        picks = _solve(few_costs, few_loads, limits, least, refused)
        total = np.sum([load[pick] for load, pick in zip(few_loads, picks, strict=True)], axis=0)
        if (total <= limits * (1 + _EXACT)).all():
            return [int(rows[pick]) for rows, pick in zip(kept, picks, strict=True)]
        # The solver takes 0.999999 for a whole choice, and so may overlook a limit by a millionth of a load.
        refused.append(picks)
    raise RuntimeError(f"The solver's choices have loads as {total.tolist()}, limits are {limits.tolist()}.")


def _undominated(cost: Floats, load: Floats) -> NDArray[np.int64]:
    """Rows of the options that none other matches or beats in everything; of equal options the first."""
    table = np.column_stack([cost, load])
    kept: list[int] = []
    for row in np.lexsort(table.T[::-1]):  # what beats an option comes before it
        if not any((table[other] <= table[row]).all() for other in kept):
            kept.append(int(row))
    return np.array(sorted(kept), dtype=np.int64)


def _solve(
    costs: Sequence[Floats], loads: Sequence[Floats], limits: Floats, least: Floats, refused: Sequence[Sequence[int]]
) -> list[int]:
    """A choice as `choose` describes it, none of those `refused`, its loads within limits as the solver sees them."""
    # Imported here: the rest of the analysis does without scipy.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import block_diag, csr_array

    # The least of each group is taken off: what is left is what there is to choose about.
    cost = np.concatenate([part - part.min() for part in costs])
    load = np.concatenate([part - part.min(axis=0) for part in loads])
    room = limits * (1 + _EXACT) - least
    room[room < _NOTHING] = 0.0
    # An option that alone takes more than all the room is out of the question, and would spoil the scale.
    usable: NDArray[np.bool_] = np.all(load <= room, axis=1)
    scale = np.divide(_SCALE, room, out=np.zeros_like(room), where=room > 0)
    rows = np.where(usable[:, None], load * scale, 0.0).T
    starts = np.cumsum([0, *(len(part) for part in costs)])
    taken = np.zeros((len(refused), len(cost)))
    for row, picks in zip(taken, refused, strict=True):
        row[starts[:-1] + picks] = 1.0
    most = np.append(room * scale, [len(costs) - 1] * len(taken))
    one_each = csr_array(block_diag([np.ones((1, len(part))) for part in costs]))
    result = milp(
        cost * (_SCALE / cost.max() if cost.any() else 1.0),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, usable.astype(np.float64)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(np.vstack([rows, taken]), -np.inf, most),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if result.status == 2:
        raise InfeasibleError(None, math.nan, math.nan)
    if result.status != 0 or result.x is None:
        raise RuntimeError(f"The solver did not finish: {result.message}")
    return [int(part.argmax()) for part in np.split(result.x, starts[1:-1])]
