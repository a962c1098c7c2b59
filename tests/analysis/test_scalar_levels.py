"""Weighted k-means on a line against all partitions, and levels that keep mean and standard deviation."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf.analysis.scalar_levels import WeightedSamples, best_levels, matched_levels


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(0.4).clamp(-1, 1)


def plain_error(values: torch.Tensor, weights: torch.Tensor, levels: torch.Tensor) -> float:
    distance = (values.double()[:, None] - levels.double()).abs().amin(-1)
    return float((weights.double() * distance.square()).sum() / weights.double().sum())


def least_error(values: torch.Tensor, weights: torch.Tensor, count: int) -> float:
    """Over all ways to cut the sorted values into `count` runs, each with its own mean."""
    order = values.argsort()
    values, weights = values[order].double(), weights[order].double()
    least = float("inf")
    for cuts in itertools.combinations(range(1, len(values)), count - 1):
        total = 0.0
        for first, last in itertools.pairwise((0, *cuts, len(values))):
            x, w = values[first:last], weights[first:last]
            mean = (w * x).sum() / w.sum() if w.sum() > 0 else 0.0
            total += float((w * (x - mean).square()).sum())
        least = min(least, total)
    return least / float(weights.sum())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([2, 4]),
    size=st.integers(5, 11),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
)
def test_no_partition_of_a_few_numbers_is_better(seed, count, size, spread):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(size, generator=generator) * 2 - 1
    weights = (spread * torch.randn(size, generator=generator)).exp()
    samples = WeightedSamples(values, weights)
    levels = best_levels(samples, count)
    assert levels.shape == (count,) and (levels.diff() > 0).all()
    least = least_error(values, weights, count)
    assert samples.error(levels) == pytest.approx(plain_error(values, weights, levels), abs=1e-12)
    assert least - 1e-12 <= plain_error(values, weights, levels) <= least + 1e-10


@pytest.mark.parametrize("count", [4, 8, 16])
def test_many_numbers_reach_a_point_where_every_level_is_the_mean_of_its_own(count):
    values = torch.cat([normal(30_000), torch.full((500,), 0.9), torch.full((500,), -0.95)])
    weights = normal(len(values), seed=1).exp()
    samples = WeightedSamples(values, weights)
    levels = best_levels(samples, count)
    nearest = (values.double()[:, None] - levels).abs().argmin(-1)
    for place, level in enumerate(levels):
        own = nearest == place
        mean = (weights[own] * values[own]).double().sum() / weights[own].double().sum()
        assert float(mean) == pytest.approx(float(level), abs=2e-5)
    for place, step in itertools.product(range(count), (-0.01, 0.01)):
        moved = levels.clone()
        moved[place] += step
        assert samples.error(moved.sort().values) > samples.error(levels)
    # No start by quantiles, as is usual, ends lower.
    for shift in (0.25, 0.5, 0.75):
        quantiles = values.double().quantile((torch.arange(count, dtype=torch.float64) + shift) / count)
        assert samples.error(levels) <= samples.error(samples.settled(quantiles)) * 1.002


def test_a_heavy_number_moves_a_level_and_order_does_not():
    values = normal(2000)
    weights = torch.ones(2000)
    plain = best_levels(WeightedSamples(values, weights), 4)
    shuffle = torch.randperm(2000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(best_levels(WeightedSamples(values[shuffle], weights[shuffle]), 4), plain)
    assert torch.equal(best_levels(WeightedSamples(values, 1e-30 * weights), 4), plain)
    place = int((values - plain[1:3].mean()).abs().argmin())
    weights[place] = 1e5
    heavy = best_levels(WeightedSamples(values, weights), 4)
    assert (heavy - values[place]).abs().min() < 1e-3 < (plain - values[place]).abs().min()


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize(
    "values", [[], [0.3], [-1.0, 1.0], [0.0] * 50, [1.0, 1.0, -1.0, 0.2], [0.5, 0.5 + 1e-8, 0.5 + 2e-8]], ids=str
)
def test_too_few_numbers_still_give_ascending_levels(values, count):
    values = torch.tensor(values)
    for weights in (torch.ones_like(values), torch.zeros_like(values)):
        samples = WeightedSamples(values, weights)
        levels = best_levels(samples, count)
        assert levels.shape == (count,) and (levels.diff() > 1e-7).all() and levels.abs().max() <= 1
        assert samples.error(levels) < 1e-11
        matched = matched_levels(samples, levels, 2.0)
        assert (matched.diff() > 0).all() and matched.abs().max() <= 2


def test_numbers_without_weight_do_not_count():
    values = torch.cat([normal(300), torch.linspace(0.95, 1, 300)])
    weights = torch.cat([torch.ones(300), torch.zeros(300)])
    alone = best_levels(WeightedSamples(values[:300], weights[:300]), 8)
    torch.testing.assert_close(best_levels(WeightedSamples(values, weights), 8), alone, atol=5e-3, rtol=0)


# ---- q-norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_decoded_mean_and_deviation_match(count, shift):
    values = (normal(40_000) + shift).clamp(-1, 1)
    weights = (3 * values).exp()  # levels of the weighted optimum are off
    samples = WeightedSamples(values, weights)
    levels = best_levels(samples, count)
    matched = matched_levels(samples, levels, 2.0)
    want = torch.stack([values.double().mean(), values.double().std(correction=0)])

    def got(table: torch.Tensor) -> torch.Tensor:
        decoded = table[(values.double()[:, None] - table).abs().argmin(-1)]
        return torch.stack([decoded.mean(), decoded.std(correction=0)])

    assert samples.decoded_moments(matched) == pytest.approx(got(matched).tolist(), abs=1e-6)
    torch.testing.assert_close(got(matched), want, atol=5e-4, rtol=0)
    assert (got(levels) - want).abs().max() > 10 * (got(matched) - want).abs().max()
    # One factor and one shift for all levels.
    ratio = matched.diff() / levels.diff()
    torch.testing.assert_close(ratio, ratio.mean().expand(count - 1), atol=1e-3, rtol=1e-3)


def test_levels_stay_within_the_limit():
    values = torch.tensor([-1.0, 1.0]).repeat(50)
    levels = torch.tensor([-0.5, -0.1, 0.1, 0.5], dtype=torch.float64)
    samples = WeightedSamples(values, torch.ones(100))
    assert matched_levels(samples, levels, 2.0).tolist() == pytest.approx([-1.0, -0.2, 0.2, 1.0])
    assert torch.equal(matched_levels(samples, levels, 0.9), levels)
