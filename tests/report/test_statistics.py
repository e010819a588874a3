from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar

from chai_eval.report import paired_difference
from chai_eval.report.statistics import (
    RESAMPLES,
    SEED,
    bits_per_byte,
    bootstrap_difference,
    exact_mcnemar,
    perplexity,
)

LEVEL = 0.95


def scores(n: int, gained: int, lost: int) -> tuple[list[int], list[int]]:
    """Baseline and method over n documents, of which the method gains some and loses some."""
    rest = n - gained - lost
    return [0] * gained + [1] * lost + [1] * rest, [1] * gained + [0] * lost + [1] * rest


def test_points_are_the_method_minus_the_baseline_in_per_cent() -> None:
    assert paired_difference([1, 1, 0, 1], [1, 0, 0, 0]).points == -50
    assert paired_difference([0.25, 0.5], [0.5, 0.5]).points == 12.5


@pytest.mark.parametrize("n", [1, 3, 100, 3000])
def test_no_differing_document_does_not_mean_certainty(n: int) -> None:
    difference = paired_difference(*scores(n, 0, 0))
    assert difference.points == 0
    # Where n documents show no event, its rate may still be 1 - 0.05^(1/n) (the exact form of the rule of three); all
    # of it may lie on one side, so the interval must be of that order.
    assert difference.high == -difference.low > 100 * (1 - 0.05 ** (1 / n)) / 2


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 5), (7, 2), (20, 0), (10, 10)])
def test_the_interval_contains_the_difference_and_stays_within_100_points(gained: int, lost: int) -> None:
    difference = paired_difference(*scores(20, gained, lost))
    assert -100 <= difference.low < difference.points + 1e-9
    assert difference.points - 1e-9 < difference.high <= 100


def test_swapping_baseline_and_method_mirrors_the_interval() -> None:
    baseline, method = scores(50, 6, 1)
    there, back = paired_difference(baseline, method), paired_difference(method, baseline)
    assert (there.points, there.low, there.high) == pytest.approx((-back.points, -back.high, -back.low))


def test_pairing_narrows_the_interval() -> None:
    """Against Wald's interval of two independent samples, where half of the documents are right under both."""
    gained, lost, n = 30, 24, 400
    both = [0, 1] * ((n - gained - lost) // 2)
    baseline = [0] * gained + [1] * lost + both
    method = [1] * gained + [0] * lost + both
    p, q = np.mean(baseline), np.mean(method)
    unpaired = 100 * 2 * 1.96 * math.sqrt((p * (1 - p) + q * (1 - q)) / n)
    difference = paired_difference(baseline, method)
    assert difference.high - difference.low < 0.6 * unpaired


def exact_coverage(n: int, gain: float, loss: float) -> float:
    """Chance that the interval contains the true difference, summed over every possible table of n documents."""
    chance = 0.0
    for gained, lost in itertools.product(range(n + 1), repeat=2):
        if gained + lost <= n:
            found = paired_difference(*scores(n, gained, lost))
            if found.low <= 100 * (gain - loss) <= found.high:
                chance += stats.multinomial.pmf([gained, lost, n - gained - lost], n, [gain, loss, 1 - gain - loss])
    return chance


@pytest.mark.parametrize("n", [4, 10, 20])
@pytest.mark.parametrize(("gain", "loss"), [(0.0, 0.0), (0.02, 0.02), (0.05, 0.15), (0.1, 0.1), (0.3, 0.1)])
def test_tiny_samples_are_covered_at_least_nominally_by_exact_enumeration(n: int, gain: float, loss: float) -> None:
    # Bonett and Price report a minimum just below nominal; a Wald interval falls to 0 here.
    assert exact_coverage(n, gain, loss) >= LEVEL - 0.01


@pytest.mark.parametrize(("n", "gain", "loss"), [(100, 0.06, 0.1), (100, 0.2, 0.15), (500, 0.03, 0.05)])
def test_coverage_in_simulation_is_nominal(n: int, gain: float, loss: float) -> None:
    runs = 4000
    drawn = np.random.default_rng(2024).multinomial(n, [gain, loss, 1 - gain - loss], size=runs)
    found = [paired_difference(*scores(n, int(gained), int(lost))) for gained, lost, _ in drawn]
    covered = np.mean([each.low <= 100 * (gain - loss) <= each.high for each in found])
    # Four standard errors of a share of `runs`; above, one point more for the adjustment, which leans to caution.
    noise = 4 * math.sqrt(LEVEL * (1 - LEVEL) / runs)
    assert LEVEL - noise <= covered <= LEVEL + noise + 0.01


def test_scores_that_are_not_binary_get_students_interval() -> None:
    draw = np.random.default_rng(7)
    baseline, method = draw.random(40), draw.random(40)
    expected = stats.ttest_rel(method, baseline).confidence_interval(LEVEL)
    difference = paired_difference(baseline, method)
    assert (difference.low, difference.high) == pytest.approx((100 * expected.low, 100 * expected.high))


def test_students_interval_covers_nominally_in_simulation() -> None:
    draw, runs, n = np.random.default_rng(11), 3000, 12
    found = [paired_difference(np.zeros(n), draw.normal(0.02, 0.1, n)) for _ in range(runs)]
    covered = np.mean([each.low <= 2 <= each.high for each in found])
    assert abs(covered - LEVEL) <= 4 * math.sqrt(LEVEL * (1 - LEVEL) / runs)


@pytest.mark.parametrize(("baseline", "method"), [([0.5], [0.25]), ([0.5, 0.7], [0.5, 0.7])])
def test_scores_without_spread_have_no_interval_rather_than_a_point(baseline: list[float], method: list[float]) -> None:
    difference = paired_difference(baseline, method)
    assert math.isnan(difference.low)
    assert math.isnan(difference.high)


@pytest.mark.parametrize(("baseline", "method"), [([], []), ([1], [1, 0]), ([1, math.nan], [1, 0])])
def test_scores_that_do_not_pair_up_are_refused(baseline: list[float], method: list[float]) -> None:
    with pytest.raises(ValueError, match="scores"):
        paired_difference(baseline, method)


def texts(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood and number of words of n documents of different lengths, under two methods."""
    draw = np.random.default_rng(seed)
    words = draw.integers(20, 400, n)
    before = -words * draw.normal(3.0, 0.3, n)
    after = before - words * draw.normal(0.05, 0.05, n)
    return np.column_stack([before, words]), np.column_stack([after, words])


def by_hand(parts: np.ndarray) -> float:
    return math.exp(-sum(likelihood for likelihood, _ in parts) / sum(words for _, words in parts))


@pytest.mark.parametrize("n", [12, 60])
def test_a_perplexitys_interval_is_the_percentile_bootstrap_over_documents_written_as_a_loop(n: int) -> None:
    before, after = texts(n, seed=n)
    found = bootstrap_difference(perplexity, before, after)
    assert found.points == pytest.approx(100 * (by_hand(after) - by_hand(before)))
    draw, differences = np.random.default_rng(99), []
    for _ in range(20_000):
        chosen = draw.integers(0, n, n)
        differences.append(100 * (by_hand(after[chosen]) - by_hand(before[chosen])))
    low, high = np.quantile(differences, [0.025, 0.975])
    # The standard error of a 2.5 % quantile of 9,999 draws is about 0.03 standard deviations; four of it, for both.
    tolerance = 4 * 0.03 * float(np.std(differences))
    assert (found.low, found.high) == pytest.approx((low, high), abs=tolerance)
    assert found.low < found.points < found.high


def test_bits_per_byte_are_resampled_likewise() -> None:
    before, after = texts(30, seed=3)
    found = bootstrap_difference(bits_per_byte, before, after)
    bits = [-sum(parts[:, 0]) / sum(parts[:, 1]) / math.log(2) for parts in (before, after)]
    assert found.points == pytest.approx(100 * (bits[1] - bits[0]))
    assert found.low < found.points < found.high


def test_a_bootstrap_interval_is_the_same_twice_and_narrower_for_the_pairing() -> None:
    before, after = texts(40, seed=5)
    found = bootstrap_difference(perplexity, before, after)
    assert bootstrap_difference(perplexity, before, after) == found
    apart = stats.bootstrap(
        (np.arange(40), np.arange(40)),
        lambda first, second: 100 * (by_hand(after[second]) - by_hand(before[first])),
        n_resamples=500,
        vectorized=False,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    assert found.high - found.low < 0.6 * (apart.high - apart.low)


def test_texts_that_do_not_differ_or_a_single_one_have_no_bootstrap_interval() -> None:
    before, after = texts(5, seed=1)
    for found in (
        bootstrap_difference(perplexity, before, before),
        bootstrap_difference(bits_per_byte, before[:1], after[:1]),
    ):
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_the_exact_p_is_that_of_statsmodels_and_of_the_binomial_test_of_flips() -> None:
    draw = np.random.default_rng(21)
    for _ in range(200):
        n = int(draw.integers(1, 200))
        baseline, method = (draw.random((2, n)) < draw.random((2, 1))).astype(float)
        found = exact_mcnemar(baseline, method)
        table = np.zeros((2, 2), dtype=int)
        np.add.at(table, (baseline.astype(int), method.astype(int)), 1)
        assert found == pytest.approx(mcnemar(table, exact=True).pvalue, rel=1e-12)
        gained, lost = table[0, 1], table[1, 0]
        if gained + lost:
            assert found == pytest.approx(stats.binomtest(int(gained), int(gained + lost)).pvalue, rel=1e-9)
        assert paired_difference(baseline, method).p == found


def test_documents_that_never_flip_give_no_reason_to_doubt_and_other_scores_no_p() -> None:
    assert exact_mcnemar([1, 0, 1], [1, 0, 1]) == 1
    assert exact_mcnemar([0.5, 1], [1, 1]) is None
    assert paired_difference([0.5, 1], [1, 0.2]).p is None
    assert bootstrap_difference(perplexity, *texts(5, seed=1)).p is None


@pytest.mark.parametrize("n", [7, 150])
def test_the_paired_bootstrap_is_scipys_over_the_numbers_of_documents(n: int) -> None:
    """The same draw of documents, for both, by scipy: no digit differs but by the order of sums."""
    before, after = texts(n, seed=n + 1)

    def points(chosen: np.ndarray, axis: int) -> np.ndarray:
        made = [np.exp(-parts[chosen, 0].sum(axis) / parts[chosen, 1].sum(axis)) for parts in (before, after)]
        return made[1] - made[0]

    expected = stats.bootstrap(
        (np.arange(n),),
        points,
        n_resamples=RESAMPLES,
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    found = bootstrap_difference(perplexity, before, after)
    assert (found.low, found.high) == pytest.approx((100 * expected.low, 100 * expected.high), rel=1e-10)


def test_the_interval_of_shares_is_near_scipys_paired_bootstrap_where_documents_are_many() -> None:
    draw = np.random.default_rng(5)
    baseline = (draw.random(2000) < 0.6).astype(float)
    method = np.where(draw.random(2000) < 0.12, 1 - baseline, baseline)
    expected = stats.bootstrap(
        (baseline, method),
        lambda one, two, axis: 100 * (two.mean(axis) - one.mean(axis)),
        n_resamples=2000,
        vectorized=True,
        paired=True,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    found = paired_difference(baseline, method)
    # Standard error of a 2.5 % quantile of 2,000 draws: 0.06 standard deviations of 0.78 points; three of it.
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.15)


# Documents, chance that one is gained, chance that one is lost: small samples, and documents that rarely differ.
TRUTHS = [(15, 0.2, 0.2), (30, 0.1, 0.2), (50, 0.05, 0.1), (300, 0.01, 0.02), (1000, 0.004, 0.008), (2000, 0.03, 0.05)]


@pytest.mark.parametrize(("n", "gain", "loss"), TRUTHS)
def test_the_interval_covers_the_truth_92_to_98_times_in_a_hundred(n: int, gain: float, loss: float) -> None:
    runs = 2000
    drawn = np.random.default_rng(n).multinomial(n, [gain, loss, 1 - gain - loss], size=runs)
    found = {
        (gained, lost): paired_difference(*scores(n, gained, lost))
        for gained, lost, _ in set(map(tuple, drawn.tolist()))
    }
    hits = [found[gained, lost] for gained, lost, _ in drawn.tolist()]
    covered = np.mean([each.low <= 100 * (gain - loss) <= each.high for each in hits])
    assert 0.92 <= covered <= 0.98
