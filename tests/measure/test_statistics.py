"""Quantiles, and ratios with their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from chai_eval.measure.statistics import Quantiles, quantiles, ratio


def test_quantiles_are_those_of_the_sorted_times() -> None:
    found = quantiles([float(value) for value in range(100, -1, -1)])
    assert found == Quantiles(median=50.0, p10=10.0, p50=50.0, p90=90.0, p99=99.0, n=101)


def test_a_ratio_is_above_one_for_what_is_faster() -> None:
    assert ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]).value == 2.0


def test_the_interval_of_a_ratio_is_that_of_a_paired_percentile_bootstrap() -> None:
    random = np.random.default_rng(1)
    load = random.gamma(4.0, size=25)  # of the machine: slows both in the same repetition
    first, second = load * random.normal(2.0, 0.1, 25), load * random.normal(1.0, 0.1, 25)
    reference = bootstrap(
        (first, second),
        lambda one, other, axis=-1: np.median(one, axis=axis) / np.median(other, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=9999,
        rng=np.random.default_rng(2),
    ).confidence_interval
    found = ratio(first.tolist(), second.tolist())
    assert found.low is not None
    assert found.high is not None
    # Two draws of 9999 resamplings: an end of the interval lies within a few hundredths of its width.
    width = reference.high - reference.low
    assert abs(found.low - reference.low) < 0.1 * width
    assert abs(found.high - reference.high) < 0.1 * width
    assert ratio(first.tolist(), second.tolist()) == found


def test_what_is_exactly_twice_as_fast_in_every_repetition_is_so_without_doubt() -> None:
    load = [1.0, 9.0, 2.0, 30.0, 4.0]
    found = ratio([2 * each for each in load], load)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_too_few_repetitions_have_a_ratio_but_no_interval() -> None:
    found = ratio([2.0, 2.0], [1.0, 1.0])
    assert (found.value, found.low, found.high) == (2.0, None, None)


def test_times_of_other_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="same repetitions"):
        ratio([1.0, 2.0], [1.0])
