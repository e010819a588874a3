"""Every method in batches equals itself written as loops over requests, heads and queries."""

from __future__ import annotations

import pytest
import torch

from chai_eval.attention.rows import Rows
from chai_eval.methods import METHODS
from tests.attention.tiny import MODELS, looped_logits, masked_logits, padded, requests
from tests.methods.cases import CASES, NOTHING
from tests.methods.cases.case import build
from tests.methods.loops import packed_requests, unpacked

# float32 with 64 hidden units and logits of order 10: rounding stays near 1e-5; the promise is 1e-4.
TOLERANCE = 1e-4


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        # What float32 rounds is relative to the largest logit of a request, not to each; on some processors it is more.
        limit = max(TOLERANCE, float(theirs.abs().max()) * TOLERANCE / 10)
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_padded_on_either_side_equals_loops(case: str, name: str) -> None:
    model = CASES[case].model(name)
    tokens = requests([*range(1, 13), 40])
    expected = looped_logits(model, tokens, CASES[case].loop_for(model))
    with CASES[case].build(model).applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), expected)
        assert_same(masked_logits(model, *padded(tokens, "right")), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_branches_of_packed_rows_equal_loops_over_each_choice_alone(case: str, name: str) -> None:
    model = CASES[case].model(name)
    contexts, branches, whole = packed_requests()
    rows = Rows.packed([len(each) for each in contexts], [[len(one) for one in each] for each in branches])
    line = torch.cat([torch.cat([context, *after]) for context, after in zip(contexts, branches, strict=True)])
    with CASES[case].build(model).applied(model), torch.no_grad():
        logits = model(input_ids=line[None], rows=rows).logits[0]
    assert_same(unpacked(logits, contexts, branches), looped_logits(model, whole, CASES[case].loop_for(model)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_score_of_a_request_does_not_depend_on_its_batch(case: str, name: str) -> None:
    model = CASES[case].model(name)
    tokens = requests([3, 17, 9, 31, 6], seed=4)
    with CASES[case].build(model).applied(model):
        alone = [masked_logits(model, *padded([each], "left"))[0] for each in tokens]
        assert_same(masked_logits(model, *padded(tokens, "left")), alone)
        assert_same(masked_logits(model, *padded(tokens[::-1], "right"))[::-1], alone)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_told_to_leave_everything_is_multi_head_attention_and_leaves_no_trace(method: str, name: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(requests([4, 25, 11]), "left")
    expected = masked_logits(model, ids, mask)
    with build(method, NOTHING[method], model).applied(model):
        assert_same(masked_logits(model, ids, mask), expected)
    after = masked_logits(model, ids, mask)
    assert all(torch.equal(one, two) for one, two in zip(after, expected, strict=True))
