from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from chai_eval.methods.keep import highest, kept_count, kept_counts


@pytest.mark.parametrize("hundredths", range(100))
def test_counts_are_exact_ceilings_of_the_decimal_that_was_typed(hundredths: int) -> None:
    expected = [math.ceil((1 - Fraction(hundredths, 100)) * n) for n in range(1, 3000)]
    sparsity = float(f"0.{hundredths:02d}")
    assert [kept_count(n, sparsity) for n in range(1, 3000)] == expected
    assert kept_counts(torch.arange(1, 3000), sparsity).tolist() == expected


def test_the_lowest_index_stays_among_ties() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert highest(values, 2).tolist() == [[False, True, True, False, False], [True, True, False, False, False]]
    counts = torch.tensor([4, 1])
    assert highest(values, counts).tolist() == [[False, True, True, True, True], [True, False, False, False, False]]


def test_as_many_as_asked_stay_and_they_are_the_highest() -> None:
    values = torch.randn(50, 37, generator=torch.Generator().manual_seed(0))
    for count in (1, 5, 36, 37):
        kept = highest(values, count)
        assert kept.sum(1).eq(count).all()
        assert torch.equal(kept, highest(values, torch.full((50,), count)))
        expected = values.topk(count).values.sort().values
        assert torch.equal(
            torch.stack([row[mask].sort().values for row, mask in zip(values, kept, strict=True)]), expected
        )
