from __future__ import annotations

import itertools

import pytest
import torch

from chai_eval.calibration.counts import (
    elbows,
    kv_saving,
    towards,
    within_budget,
    within_tolerance,
)

LAYERS, HEADS = 4, 6
OWN = torch.arange(1, HEADS + 1).expand(LAYERS, -1)


def convex(seed: int = 0) -> torch.Tensor:
    """Curves in which each further merge costs more, zero with all heads."""
    steps = torch.rand(LAYERS, HEADS - 1, generator=torch.Generator().manual_seed(seed)).cumsum(1).flip(1)
    return torch.cat((steps.flip(1).cumsum(1).flip(1), torch.zeros(LAYERS, 1)), dim=1).double()


def test_elbow_is_where_the_curve_bends() -> None:
    bent = torch.tensor([[10, 6, 2, 1.8, 1.6, 1.4]])
    assert elbows(bent) == [3]
    assert towards([3], 6, 0.0) == [6]
    assert towards([3, 6], 6, 1.0) == [3, 6]


def test_a_straight_curve_has_no_elbow_and_keeps_all_heads() -> None:
    assert elbows(torch.tensor([[5.0, 4, 3, 2, 1, 0]])) == [6]


def test_tolerance_is_the_smallest_count_within_it() -> None:
    curve = torch.tensor([[10.0, 5, 2, 1, 0.5, 0]])
    assert [within_tolerance(curve, share) for share in (0, 0.1, 0.15, 0.5, 1)] == [[6], [4], [4], [2], [1]]


@pytest.mark.parametrize("saving", [0.05, 0.14, 0.21, 0.4])
def test_budget_is_met_within_one_head_at_the_least_cost(saving: float) -> None:
    cost = convex()
    counts = within_budget(cost, OWN, HEADS, saving)
    reached = kv_saving(counts, OWN, HEADS)
    assert saving <= reached + 1e-9 < saving + 1 / (2 * HEADS * LAYERS) + 1e-9
    best = min(
        sum(float(cost[layer, count - 1]) for layer, count in enumerate(each))
        for each in itertools.product(range(1, HEADS + 1), repeat=LAYERS)
        if kv_saving(each, OWN, HEADS) >= saving - 1e-9
    )
    # Merges of convex curves taken in order of cost are the optimum.
    assert sum(float(cost[layer, count - 1]) for layer, count in enumerate(counts)) == pytest.approx(best)


def test_no_more_is_saved_than_asked_for_where_fewer_clusters_happen_to_cost_less() -> None:
    cost = torch.tensor([[0.1, 3, 3, 3, 3, 0]]).double().expand(LAYERS, -1)
    for saving in (0.02, 0.05, 0.11):
        reached = kv_saving(within_budget(cost, OWN, HEADS, saving), OWN, HEADS)
        assert saving <= reached + 1e-9 < saving + 1 / (2 * HEADS * LAYERS) + 1e-9


def test_of_counts_that_save_the_same_the_cheapest_is_taken() -> None:
    kept = torch.tensor([[1.0, 1, 1, 2, 2, 2, 3, 3, 3]])  # nine heads share three K/V heads
    cost = torch.tensor([[9.0, 8, 7, 1, 5, 6, 0.3, 0.2, 0]])
    assert within_budget(cost, kept, 3, 1 / 6) == [4]
    assert within_budget(cost, kept, 3, 2 / 6) == [3]


def test_a_budget_out_of_reach_gives_what_comes_closest() -> None:
    assert within_budget(convex(), OWN, HEADS, 0.49) == [1] * LAYERS


def test_a_layer_that_saves_nothing_keeps_all_heads() -> None:
    kept = torch.tensor([1, 2, 3, 3, 3, 3]).expand(LAYERS, -1)  # six heads share three K/V heads
    counts = within_budget(convex(), kept, 3, 0.1)
    assert set(counts) <= {1, 2, HEADS}
    assert kv_saving(counts, kept, 3) >= 0.1
