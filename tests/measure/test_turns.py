"""Whose turn it is: in every place, and after every other contender, equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from chai_eval.measure.clock import Turn, in_turn, turn_order

NAMES = "ABCDEFG"


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("first", [-3, 0, 5])
def test_each_contender_has_each_place_and_each_predecessor_equally_often(count: int, first: int) -> None:
    cycle = count if count % 2 == 0 else 2 * count
    orders = [turn_order(NAMES[:count], first + repetition) for repetition in range(cycle)]
    assert all(sorted(order) == sorted(NAMES[:count]) for order in orders)
    places = Counter((name, place) for order in orders for place, name in enumerate(order))
    assert set(places.values()) == {cycle // count}
    assert len(places) == count**2
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert len(after) == count * (count - 1)
    assert set(after.values()) <= {cycle // count}


@pytest.mark.parametrize("count", range(1, 8))
def test_places_are_shared_out_within_as_many_repetitions_as_there_are_contenders(count: int) -> None:
    orders = [turn_order(NAMES[:count], repetition) for repetition in range(count)]
    assert all(sorted(at_place) == sorted(NAMES[:count]) for at_place in zip(*orders, strict=True))


def test_the_loop_runs_the_warm_up_too_and_tells_only_what_came_after_it() -> None:
    ran: list[str] = []
    contenders = {name: lambda name=name: ran.append(name) or name.lower() for name in "AB"}
    found = list(in_turn(contenders, 2, warmup=1))
    assert "".join(ran) == "BA" + "AB" + "BA"
    assert found == [Turn("A", 0, 0, "a"), Turn("B", 0, 1, "b"), Turn("B", 1, 0, "b"), Turn("A", 1, 1, "a")]


def test_without_contenders_nothing_runs() -> None:
    assert list(in_turn({}, 3)) == []
