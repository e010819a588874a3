"""Differences of scores on the same documents, with intervals that are honest for few differing documents.

scipy and statsmodels, which take half a second to import, are imported where there is a difference to test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chai_eval.student import student_interval

RESAMPLES = 9999
# Numbers drawn at once: 32 MiB for each of the sums.
DRAWN = 1 << 22
SEED = 1234

# Log-likelihoods and weights (words, bytes), `[..., documents]` each, and the axis of the documents, to the metric.
Aggregate = Callable[[NDArray[np.float64], NDArray[np.float64], int], NDArray[np.float64]]


@dataclass(frozen=True)
class Difference:
    """A mean difference and its interval, in percentage points.

    `low` and `high` are nan where the documents don't determine an interval. `p` is the exact McNemar test's, as
    `exact_mcnemar` gives it; None where scores are not 0 or 1.
    """

    points: float
    low: float
    high: float
    p: float | None = None


def paired_difference(baseline: ArrayLike, method: ArrayLike, *, level: float = 0.95) -> Difference:
    """Difference `method - baseline` of the mean score over the same documents, with its paired interval.

    Scores of 0 and 1 get the adjusted Wald interval of Bonett and Price (2012, "Adjusted Wald confidence interval
    for a difference of binomial proportions based on paired data", J. Educational and Behavioral Statistics 37,
    equation 4): one document is added to each of the two discordant counts. It covers its level also where few
    documents or none differ, where a Wald or bootstrap interval shrinks to a point. Neither scipy nor statsmodels
    has an interval for this difference. Other scores get Student's interval of the mean difference.

    Parameters
    ----------
    baseline, method
        Scores per document, [documents], in the same order; 1 is a full score.
    level
        Coverage.

    Raises
    ------
    ValueError
        When the two don't pair up, are empty, or are not finite.
    """
    first, second = np.asarray(baseline, dtype=float), np.asarray(method, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(f"scores of the same documents wanted, got shapes {first.shape} and {second.shape}")
    difference = second - first
    if not np.isfinite(difference).all():
        raise ValueError("scores must be finite")
    points = 100 * float(difference.mean())
    if _binary(first) and _binary(second):
        low, high = _bonett_price(
            gained=int((difference > 0).sum()), lost=int((difference < 0).sum()), n=first.size, level=level
        )
    else:
        low, high = student_interval(difference, level=level)
    return Difference(points, 100 * low, 100 * high, exact_mcnemar(first, second))


def exact_mcnemar(baseline: ArrayLike, method: ArrayLike) -> float | None:
    """Two-sided p of McNemar's exact test that documents flip either way alike; None for scores other than 0 and 1.

    Parameters
    ----------
    baseline, method
        Scores per document, [documents], in the same order.

    Returns
    -------
    float or None
        Chance, were a flip either way as likely as the other, of flips as one-sided as these or more so; 1 where no
        document flipped.
    """
    first, second = np.asarray(baseline, dtype=float), np.asarray(method, dtype=float)
    if not (_binary(first) and _binary(second)):
        return None
    table = [[int(((first == before) & (second == after)).sum()) for after in (1, 0)] for before in (1, 0)]
    from statsmodels.stats.contingency_tables import mcnemar

    return float(mcnemar(table, exact=True).pvalue)


def perplexity(log_likelihoods: NDArray[np.float64], weights: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Perplexity per unit of weight over documents, as lm-eval's `weighted_perplexity` has it."""
    return np.exp(-log_likelihoods.sum(axis) / weights.sum(axis))


def bits_per_byte(log_likelihoods: NDArray[np.float64], weights: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Bits per unit of weight over documents, as lm-eval has it."""
    return -log_likelihoods.sum(axis) / weights.sum(axis) / math.log(2)


def bootstrap_difference(
    aggregate: Aggregate, baseline: ArrayLike, method: ArrayLike, *, level: float = 0.95
) -> Difference:
    """Difference `method - baseline` of a metric that is no mean over documents, with its paired bootstrap interval.

    Percentiles over resampled documents, the same for both; the draw is fixed, so that a table is printed alike twice.

    Parameters
    ----------
    aggregate
        `perplexity` or `bits_per_byte`.
    baseline, method
        Log-likelihood and weight of each document, [documents, 2], in the same order.
    level
        Coverage.

    Returns
    -------
    Difference
        Times 100, as everywhere; without an interval for a single document, or where no document differs.
    """
    parts = [*np.asarray(baseline, dtype=float).T, *np.asarray(method, dtype=float).T]

    def difference(*drawn: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return aggregate(drawn[2], drawn[3], axis) - aggregate(drawn[0], drawn[1], axis)

    points, n = 100 * float(difference(*parts, axis=-1)), parts[0].size
    if n < 2 or np.array_equal(parts[0], parts[2]):
        return Difference(points, math.nan, math.nan)
    from scipy.stats import bootstrap

    interval = bootstrap(
        parts,
        difference,
        n_resamples=RESAMPLES,
        batch=max(DRAWN // n, 1),
        vectorized=True,
        paired=True,
        confidence_level=level,
        method="percentile",
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    return Difference(points, 100 * float(interval.low), 100 * float(interval.high))


def _binary(scores: NDArray[np.float64]) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def _bonett_price(*, gained: int, lost: int, n: int, level: float) -> tuple[float, float]:
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    from scipy.stats import norm

    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)
