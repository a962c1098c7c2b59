"""Levels for numbers on a line: weighted k-means, and levels with the moments of what they stand for."""

import torch

# Cells of the search for a start, which is exact for no more numbers than that.
_CELLS = 512
_ROUNDS = 200
# Iterations stop when nothing moves by more than this.
_STILL = 1e-9
_DECIMALS = 6


class WeightedSamples:
    """Numbers on a line with weights, sorted, and their running sums.

    Args:
        values: `[n]`, finite, any order.
        weights: `[n]`, finite, not negative; where all are zero, all count alike.
    """

    def __init__(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        order = values.argsort(stable=True)
        self.values = values[order].double()
        shares = weights[order].double()
        total = shares.sum()
        shares = shares / total if float(total) > 0 else torch.full_like(shares, 1 / max(1, shares.numel()))
        columns = (shares, shares * self.values, shares * self.values.square())
        self._sums = torch.stack([torch.cat([column.new_zeros(1), column.cumsum(0)]) for column in columns])

    def __len__(self) -> int:
        return self.values.numel()

    def ends(self, levels: torch.Tensor) -> torch.Tensor:
        """Where the samples of each level end, `[len(levels) + 1]` with 0 in front: every one has its nearest."""
        bounds = (levels[1:] + levels[:-1]) / 2
        inner = torch.searchsorted(self.values, bounds, right=True)
        return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), len(self))])

    def error(self, levels: torch.Tensor) -> float:
        """Weighted mean squared distance to the nearest of ascending levels."""
        weight, first, second = self._sums[:, self.ends(levels)].diff()
        return float((second - 2 * levels * first + levels.square() * weight).sum().clamp_min(0.0))

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation, without weights; zeros of no samples."""
        if not len(self):
            return 0.0, 0.0
        return float(self.values.mean()), float(self.values.std(correction=0))

    def decoded_moments(self, levels: torch.Tensor) -> tuple[float, float]:
        """Mean and standard deviation of the levels nearest to the samples, without weights; zeros of no samples."""
        shares = self.ends(levels).diff().double() / max(1, len(self))
        mean = (shares * levels).sum()
        return float(mean), float((shares * (levels - mean).square()).sum().sqrt())

    def start(self, count: int) -> torch.Tensor:
        """Levels of least weighted squared error for bounds on a grid, by dynamic programming.

        The grid divides the range into `_CELLS` cells; for no more samples than that, each has a cell of its own and
        the answer is the best there is (Wang and Song, "Ckmeans.1d.dp", 2011).

        Returns:
            At most `count` ascending levels, float64.
        """
        edges = torch.arange(len(self) + 1)
        if len(self) > _CELLS:
            bounds = torch.linspace(float(self.values[0]), float(self.values[-1]), _CELLS + 1, dtype=torch.float64)
            edges = torch.searchsorted(self.values, bounds[1:-1], right=True).unique()
            edges = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), len(self))]).unique()
        weight, first, second = self._sums[:, edges]
        weights, firsts, seconds = (sums[None, :] - sums[:, None] for sums in (weight, first, second))
        cost = seconds - torch.where(weights > 0, firsts.square() / weights, 0.0)
        ahead = torch.ones_like(cost, dtype=torch.bool).triu(1)  # a cluster has a cell at least
        cost = torch.where(ahead, cost.clamp_min(0.0), torch.inf)
        best, froms = cost[0], []
        for _ in range(min(count, len(edges) - 1) - 1):
            best, came_from = (best[:, None] + cost).min(0)
            froms.append(came_from)
        ends = [len(edges) - 1]
        for came_from in reversed(froms):
            ends.append(int(came_from[ends[-1]]))
        ends = [0, *reversed(ends)]
        mass, moment = weight[ends].diff(), first[ends].diff()
        levels: torch.Tensor = (moment / mass)[mass > 0]
        return levels

    def settled(self, levels: torch.Tensor) -> torch.Tensor:
        """Levels after Lloyd's iterations: each the weighted mean of the samples nearest to it, if there are any."""
        for _ in range(_ROUNDS):
            weight, first, _ = self._sums[:, self.ends(levels)].diff()
            moved = torch.where(weight > 0, first / weight, levels)
            if bool((moved - levels).abs().max() <= _STILL):
                return moved
            levels = moved
        return levels


def best_levels(samples: WeightedSamples, count: int) -> torch.Tensor:
    """Levels of least weighted squared error: `[count]`, float64, ascending, six decimals.

    Where there are fewer different samples than levels, the others halve the widest gaps of the range -1 to 1; without
    any sample levels are evenly spaced.
    """
    if not len(samples):
        return torch.linspace(-1, 1, count, dtype=torch.float64)
    settled = samples.settled(samples.start(count))
    found: torch.Tensor = settled.mul(10**_DECIMALS).round().div(10**_DECIMALS).unique()
    while len(found) < count:
        points = torch.cat([found.new_tensor([-1.0]), found, found.new_tensor([1.0])]).sort().values
        widest = int(points.diff().argmax())
        middle = round(float(points[widest] + points[widest + 1]) / 2, _DECIMALS)
        found = torch.cat([found, found.new_tensor([middle])]).sort().values
    return found


def matched_levels(samples: WeightedSamples, levels: torch.Tensor, most: float) -> torch.Tensor:
    """Levels shifted and scaled so that what is decoded has the mean and the standard deviation of the samples.

    KVQuant's Q-Norm (arXiv 2401.18079). Samples take the nearest of the levels as they are in the end, so
    shift and scale are found by repetition. Of a few samples no levels may match exactly; the closest are taken.

    Args:
        samples: What is quantized.
        levels: `[n]`, float64, ascending.
        most: Largest size of a level.

    Returns:
        Like `levels`, six decimals; `levels` themselves where no better are found.
    """
    if not len(samples):
        return levels
    mean, spread = samples.moments()
    best, least, tried = levels, float("inf"), levels
    for _ in range(_ROUNDS):
        got_mean, got_spread = samples.decoded_moments(tried)
        miss = max(abs(got_mean - mean), abs(got_spread - spread))
        if miss < least:
            best, least = tried, miss
        if miss <= _STILL or got_spread <= 0:
            break
        exact = (tried - got_mean) * (spread / got_spread) + mean
        tried = exact.mul(10**_DECIMALS).round().div(10**_DECIMALS)
        if bool((tried.abs() > most).any()) or bool((tried.diff() <= 0).any()):
            break
    return best
