"""Differences of scores on the same documents, with intervals that are honest for few differing documents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm
from statsmodels.stats.weightstats import DescrStatsW


@dataclass(frozen=True)
class Difference:
    """A mean difference and its interval, in percentage points.

    `low` and `high` are nan where the documents don't determine an interval.
    """

    points: float
    low: float
    high: float


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
        low, high = _student(difference, level)
    return Difference(points, 100 * low, 100 * high)


def _binary(scores: NDArray[np.float64]) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def _bonett_price(*, gained: int, lost: int, n: int, level: float) -> tuple[float, float]:
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def _student(difference: NDArray[np.float64], level: float) -> tuple[float, float]:
    # Differences that are all the same have no spread to judge by; a point would claim certainty.
    if difference.size < 2 or np.ptp(difference) == 0:
        return math.nan, math.nan
    low, high = DescrStatsW(difference).tconfint_mean(alpha=1 - level)
    return float(low), float(high)
