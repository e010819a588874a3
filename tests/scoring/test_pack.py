from __future__ import annotations

import random

import pytest

from chai_eval.errors import RunError
from chai_eval.scoring.pack import ScoringRequest, batches, documents, packed_input


def some_requests(seed: int = 0) -> list[ScoringRequest]:
    draw = random.Random(seed)
    asked = []
    for _ in range(30):
        context = tuple(draw.randrange(50) for _ in range(draw.randint(1, 20)))
        for _ in range(draw.randint(1, 4)):
            asked.append(ScoringRequest(context, tuple(draw.randrange(50) for _ in range(draw.randint(1, 6)))))
    return asked


def test_every_request_is_scored_once_whatever_the_budget() -> None:
    asked = some_requests()
    for budget in (1, 50, 10_000):
        plan = batches(documents(asked, 5), budget)
        assert sorted(number for batch in plan for number in batch.requests) == list(range(len(asked)))


def test_no_pass_exceeds_the_budget_but_a_document_that_does_alone() -> None:
    plan = batches(documents(some_requests(), 1), 40)
    for batch in plan:
        assert sum(row.tokens for row in batch.documents) <= 40 or len(batch.documents) == 1


def test_the_plan_does_not_depend_on_the_order_of_the_requests() -> None:
    asked = some_requests()
    other = asked[::-1]
    ours = [
        [sorted((asked[n].context, asked[n].continuation) for n in b.requests)]
        for b in batches(documents(asked, 5), 60)
    ]
    theirs = [
        [sorted((other[n].context, other[n].continuation) for n in b.requests)]
        for b in batches(documents(other, 5), 60)
    ]
    assert ours == theirs


def test_a_context_is_computed_once_for_all_its_continuations() -> None:
    asked = [ScoringRequest((1, 2, 3), end) for end in [(4, 5), (6, 7, 8), (9,), (4, 5)]]
    rows = documents(asked, 3)
    assert [row.tokens for row in rows] == [3 + 1 + 2]


def test_what_all_continuations_begin_with_is_computed_once_too() -> None:
    asked = [ScoringRequest((1, 2), (3, 4, 5, end, 9)) for end in (6, 7, 8)]
    (row,) = documents(asked, 5)
    assert (row.context, row.branches) == ((1, 2, 3, 4, 5), ((6,), (7,), (8,)))
    assert len(documents(asked, 6)) == 3


def test_a_context_shorter_than_what_a_method_looks_at_is_not_shared() -> None:
    asked = [ScoringRequest((1, 2, 3), end) for end in [(4, 5), (6, 7, 8), (9,), (4, 5)]]
    rows = documents(asked, 4)
    assert sorted(row.tokens for row in rows) == [3, 4, 5]
    assert all(len(row.branches) <= 1 for row in rows)


def test_each_token_to_score_is_predicted_by_the_token_before_it() -> None:
    asked = some_requests(1)
    for batch in batches(documents(asked, 5), 80):
        packed = packed_input(batch, asked)
        line = packed.tokens[0]
        offset = 0
        for number, count in zip(batch.requests, packed.counts, strict=True):
            request = asked[number]
            assert tuple(packed.target[offset : offset + count].tolist()) == request.continuation
            before = line[packed.keep[packed.source[offset : offset + count]]].tolist()
            assert before == [request.context[-1], *request.continuation[:-1]]
            offset += count


def test_long_texts_that_share_next_to_nothing_have_rows_of_their_own() -> None:
    draw = random.Random(0)
    windows = [ScoringRequest((0,), tuple(draw.randrange(50) for _ in range(100))) for _ in range(20)]
    assert sorted(row.tokens for row in documents(windows, 1)) == [100] * 20


def test_many_texts_that_share_their_start_do_not_make_one_endless_row() -> None:
    draw = random.Random(0)
    start = tuple(range(10))
    asked = [ScoringRequest(start, tuple(draw.randrange(50) for _ in range(9))) for _ in range(300)]
    rows = documents(asked, 5)
    assert max(row.tokens for row in rows) <= 4 * 18
    assert max(row.tokens for row in documents(asked, 5, 30)) <= 30
    assert sorted(number for row in rows for number, _, _ in row.requests) == list(range(300))


def test_a_continuation_longer_than_the_models_positions_is_refused() -> None:
    with pytest.raises(RunError, match="continuation of 9 tokens .* allowed: up to the model's 8 positions"):
        ScoringRequest((1,), tuple(range(9))).truncated(8)
