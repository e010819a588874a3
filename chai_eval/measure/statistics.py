"""Figures from raw times: quantiles, and ratios of what was timed in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Resamplings of a bootstrap interval, and the seed that makes it the same for the same samples.
RESAMPLES, SEED = 9999, 0
# Fewer repetitions say nothing about the spread of a ratio.
LEAST_REPETITIONS = 3


@dataclass(frozen=True)
class Ratio:
    """How many times as fast something is: above 1 is faster. The interval covers 95 %, None where it is unknown."""

    value: float
    low: float | None
    high: float | None

    @property
    def spread(self) -> str:
        """The interval, or a dash."""
        return "–" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"

    def text(self, unit: str = "") -> str:
        """The ratio, and its interval where it is known."""
        return f"{self.value:.2f}{unit}" + ("" if self.low is None else f" ({self.spread})")


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of `n` times, in seconds; the median under both its names."""

    median: float
    p10: float
    p50: float
    p90: float
    p99: float
    n: int


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Their quantiles, with linear interpolation."""
    p10, p50, p90, p99 = (float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9, 0.99)))
    return Quantiles(p50, p10, p50, p90, p99, len(seconds))


def ratio(baseline: Sequence[float], other: Sequence[float]) -> Ratio:
    """`median(baseline) / median(other)` over repetitions in which each had its turn.

    The interval is a percentile bootstrap over repetitions (Efron and Tibshirani, 1993, chapter 13), drawn in pairs:
    what slowed a repetition down slowed both. It is scipy's `bootstrap(…, paired=True, method="percentile")`, which a
    machine that only measures need not have. ValueError where the seconds of the two don't pair up, or are empty.
    """
    first, second = np.asarray(baseline, dtype=float), np.asarray(other, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(f"times of the same repetitions wanted, got shapes {first.shape} and {second.shape}")
    value = float(np.median(first) / np.median(second))
    if first.size < LEAST_REPETITIONS:
        return Ratio(value, None, None)
    drawn = np.random.default_rng(SEED).integers(first.size, size=(RESAMPLES, first.size))
    ratios = np.median(first[drawn], axis=1) / np.median(second[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(value, float(low), float(high))
