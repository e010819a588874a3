from __future__ import annotations

import itertools

import pytest
import torch

from chai_eval.calibration.medoids import representatives


def costs(heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(heads, heads, generator=generator, dtype=torch.float64).fill_diagonal_(0)


def cheapest(cost: torch.Tensor, count: int, kv_heads: int, keep: int) -> float:
    """Every choice of representatives tried."""
    heads = len(cost)
    sizes = range(1, count + 1)
    choices = (chosen for size in sizes for chosen in itertools.combinations(range(heads), size))
    group = heads // kv_heads
    fitting = [list(each) for each in choices if len({head // group for head in each}) <= keep]
    return min(float(cost[:, each].amin(1).sum()) for each in fitting)


def total(cost: torch.Tensor, serving: torch.Tensor) -> float:
    return float(sum(cost[head, by] for head, by in enumerate(serving.tolist())))


@pytest.mark.parametrize("count", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_representatives_are_the_cheapest_of_all_choices(count: int, seed: int) -> None:
    cost = costs(9, seed)
    serving = representatives(cost, count)
    assert torch.equal(serving[serving], serving)
    assert len(serving.unique()) <= count
    assert total(cost, serving) == pytest.approx(cheapest(cost, count, 9, 9), abs=1e-9)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_no_more_kv_heads_are_kept_than_allowed(keep: int) -> None:
    cost = costs(9, 4)
    serving = representatives(cost, 5, kv_heads=3, keep=keep)
    assert len((serving.unique() // 3).unique()) <= keep
    assert total(cost, serving) == pytest.approx(cheapest(cost, 5, 3, keep), abs=1e-9)


def test_tiny_costs_are_told_apart() -> None:
    cost = costs(9, 5) * 1e-12
    assert torch.equal(representatives(cost, 4), representatives(cost * 1e12, 4))
