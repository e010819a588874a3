"""Every method in batches equals itself written as loops over requests, heads and queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from chai_eval.attention.rows import Rows
from chai_eval.methods import METHODS, build_method
from tests.attention.tiny import HEADS, LAYERS, MODELS, HeadLoop, looped_logits, masked_logits, padded, requests
from tests.methods.loops import (
    adaptive_loop,
    dejavu_loop,
    head_prune_loop,
    packed_requests,
    served_loop,
    spatten_loop,
    unpacked,
    v_reuse_loop,
)

# float32 with 64 hidden units and logits of order 10: rounding stays near 1e-5; the promise is 1e-4.
TOLERANCE = 1e-4

LABELS = [[0, 1, 2, 3, 4, 5, 6, 7], [5, 5, 0, 0, 5, 1, 1, 9], [3] * HEADS]
LOWEST = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 2, 2, 0, 5, 5, 7], [0] * HEADS]
SERVING = [[0, 1, 2, 3, 4, 5, 6, 7], [4, 4, 3, 3, 4, 5, 4, 3], [6] * HEADS]
PRUNED = [[], [1, 6, 7], [0, 1, 2, 3, 5, 6, 7]]
COUNTS = [8, 3, 1]


class Case(NamedTuple):
    method: str
    settings: dict[str, Any]
    loop: Callable[[], HeadLoop]


CASES = {
    "chai_static": Case("chai_static", {"membership": LABELS}, lambda: served_loop(LOWEST)),
    "v_reuse": Case("v_reuse", {"clusters": COUNTS}, lambda: v_reuse_loop(COUNTS)),
    "output_aware": Case("output_aware", {"membership": SERVING}, lambda: served_loop(SERVING)),
    "output_aware_adaptive": Case(
        "output_aware",
        {"membership": SERVING, "adaptive": True, "probe_tokens": 4},
        lambda: adaptive_loop(SERVING, 4),
    ),
    "dejavu_10": Case("dejavu", {"sparsity": 0.1}, lambda: dejavu_loop(0.1)),
    "dejavu_50": Case("dejavu", {"sparsity": 0.5}, lambda: dejavu_loop(0.5)),
    "spatten": Case(
        "spatten",
        {"token_sparsity": 0.3, "head_sparsity": 0.25, "spare_layers": 1},
        lambda: spatten_loop(0.3, 0.25, spare_layers=1),
    ),
    "spatten_tokens": Case("spatten", {"token_sparsity": 0.7}, lambda: spatten_loop(0.7, 0.0)),
    "spatten_heads": Case(
        "spatten",
        {"token_sparsity": 0, "head_sparsity": 0.6, "spare_layers": 1},
        lambda: spatten_loop(0.0, 0.6, spare_layers=1),
    ),
    "spatten_from_the_first_layer": Case(
        "spatten",
        {"token_sparsity": 0.5, "head_sparsity": 0.5, "spare_layers": 0},
        lambda: spatten_loop(0.5, 0.5, spare_layers=0),
    ),
    "head_prune": Case("head_prune", {"pruned": PRUNED}, lambda: head_prune_loop(PRUNED)),
}

# Settings that leave everything as it is.
NOTHING = {
    "mha": {},
    "chai": {"clusters": [[HEADS, LAYERS]]},
    "v_reuse": {"clusters": [[HEADS, LAYERS]]},
    "chai_static": {"membership": [list(range(HEADS))] * LAYERS},
    "output_aware": {"membership": [list(range(HEADS))] * LAYERS},
    "dejavu": {"sparsity": 0, "mlp_sparsity": 0},
    "spatten": {"token_sparsity": 0, "head_sparsity": 0},
    "head_prune": {"pruned": [[]] * LAYERS},
}


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        # What float32 rounds is relative to the largest logit of a request, not to each; on some processors it is more.
        limit = max(TOLERANCE, float(theirs.abs().max()) * TOLERANCE / 10)
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_padded_on_either_side_equals_loops(case: str, name: str) -> None:
    model, (method, settings, loop) = MODELS[name](), CASES[case]
    tokens = requests([*range(1, 13), 40])
    expected = looped_logits(model, tokens, loop())
    with build_method(method, **settings).applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), expected)
        assert_same(masked_logits(model, *padded(tokens, "right")), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_branches_of_packed_rows_equal_loops_over_each_choice_alone(case: str, name: str) -> None:
    model, (method, settings, loop) = MODELS[name](), CASES[case]
    contexts, branches, whole = packed_requests()
    rows = Rows.packed([len(each) for each in contexts], [[len(one) for one in each] for each in branches])
    line = torch.cat([torch.cat([context, *after]) for context, after in zip(contexts, branches, strict=True)])
    with build_method(method, **settings).applied(model), torch.no_grad():
        logits = model(input_ids=line[None], rows=rows).logits[0]
    assert_same(unpacked(logits, contexts, branches), looped_logits(model, whole, loop()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_score_of_a_request_does_not_depend_on_its_batch(case: str, name: str) -> None:
    model, (method, settings, _) = MODELS[name](), CASES[case]
    tokens = requests([3, 17, 9, 31, 6], seed=4)
    with build_method(method, **settings).applied(model):
        alone = [masked_logits(model, *padded([each], "left"))[0] for each in tokens]
        assert_same(masked_logits(model, *padded(tokens, "left")), alone)
        assert_same(masked_logits(model, *padded(tokens[::-1], "right"))[::-1], alone)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_told_to_leave_everything_is_multi_head_attention_and_leaves_no_trace(method: str, name: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(requests([4, 25, 11]), "left")
    expected = masked_logits(model, ids, mask)
    with build_method(method, **NOTHING[method]).applied(model):
        assert_same(masked_logits(model, ids, mask), expected)
    after = masked_logits(model, ids, mask)
    assert all(torch.equal(one, two) for one, two in zip(after, expected, strict=True))
