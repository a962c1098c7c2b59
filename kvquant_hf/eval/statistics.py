"""Tests and intervals for differences between two caches on the same samples."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 5000
CONFIDENCE = 0.95
Interval = tuple[float, float]


def mcnemar(worse: int, better: int) -> float:
    """Two-sided p-value of the exact McNemar test (McNemar 1947; exact form: binomial test on discordant pairs).

    For graded metrics, where `worse` and `better` count samples whose value fell and rose, this is the sign test.

    Args:
        worse: Samples that the first run solved and the second did not.
        better: The other way round.

    Returns:
        Probability of a split at least as uneven, were both directions equally likely; 1 without discordant pairs.
    """
    if not worse + better:
        return 1.0
    from scipy import stats  # the intervals below are used by scoring, which does without the `eval` extra

    return float(stats.binomtest(better, worse + better, 0.5).pvalue)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % percentile bootstrap interval of a mean (Efron 1979), seeded; `None` for fewer than two values."""
    return bootstrap(lambda sample: sample.mean(axis=-1), values)


def bootstrap(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: Sequence[float]
) -> Interval | None:
    """95 % percentile bootstrap interval of a statistic, seeded; `None` for fewer than two values.

    Args:
        statistic: Maps `[resamples, n]` to `[resamples]`.
        values: The independent units, such as samples or chunks of text.
    """
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return None
    picks = np.random.default_rng(0).integers(0, len(data), size=(RESAMPLES, len(data)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(statistic(data[picks]), [tail, 100 - tail])
    return float(low), float(high)
