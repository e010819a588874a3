"""What pages are read for: bounds that no key exceeds, as many pages as are asked for, and what that saves."""

from __future__ import annotations

import pytest
import torch

from chai_eval.methods import build_method
from chai_eval.methods.quest import page_bounds, read_pages
from tests.attention.tiny import MODELS
from tests.methods.cases.ours import COUNTS


def test_no_key_of_a_page_scores_more_than_its_bound_and_a_page_of_one_key_just_as_much() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 5, 8).double(), torch.randn(2, 3, 23, 8).double()
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    found = page_bounds(query, key, 4)
    assert found.shape == (2, 6, 5, 5)
    assert bool((scores[..., :20].unflatten(-1, (5, 4)).amax(-1) <= found + 1e-12).all())
    torch.testing.assert_close(page_bounds(query, key, 1), scores)


@pytest.mark.parametrize(("read", "count"), [(0.1, 1), (0.3, 3), (0.31, 4), (0.7, 7), (1.0, 10)])
def test_of_earlier_pages_the_highest_are_read_the_first_among_ties_and_later_ones_are_not_hidden(
    read: float, count: int
) -> None:
    bounds = torch.tensor([5.0, 9, 9, -3, 9, 9, 9, 9, 9, 9, 100, 100])
    found = read_pages(bounds.expand(1, 1, 1, -1), torch.tensor([[10]]), read)
    best = [1, 2, 4, 5, 6, 7, 8, 9, 0, 3]
    assert set(found.flatten().nonzero().flatten().tolist()) == {*best[:count], 10, 11}


def test_what_is_read_is_pages_and_their_bounds_beside_what_another_method_saves() -> None:
    model = MODELS["llama"]()
    method = build_method(
        "chai", clusters=COUNTS, **{"with": [{"name": "quest", "read": 0.25, "page_size": 8, "spare_layers": 1}]}
    )
    layers = method.footprint(model)
    assert layers is not None
    assert [(each.keys, each.read, each.probe_tokens) for each in layers] == [(8, 1, 0), (3, 0.375, 5), (1, 0.375, 5)]
