"""CHAI in batches equals CHAI written as loops over requests and heads, with scikit-learn's partition."""

from __future__ import annotations

import pytest
import torch

from chai_eval.attention.rows import Rows
from chai_eval.methods import build_method
from tests.attention.tiny import MODELS, chai_loop, looped_logits, masked_logits, padded, requests

# float32 with 64 hidden units and logits of order 10: rounding stays near 1e-5; the promise is 1e-4.
TOLERANCE = 1e-4
COUNTS = [8, 3, 1]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("representative", ["first", "medoid"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_lengths_around_the_probe_equal_loops_over_requests_and_heads(
    name: str, representative: str, side: str
) -> None:
    model = MODELS[name]()
    tokens = requests([*range(1, 13), 40])
    expected = looped_logits(model, tokens, chai_loop(COUNTS, representative=representative))
    method = build_method("chai", clusters=COUNTS, representative=representative)
    with method.applied(model):
        found = masked_logits(model, *padded(tokens, side))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("probe_tokens", [1, 3, 8])
@pytest.mark.parametrize("features", ["triangle", "full"])
def test_other_probes_equal_loops(probe_tokens: int, features: str) -> None:
    model = MODELS["llama_gqa"]()
    tokens = requests([2, 7, 8, 9, 20], seed=1)
    # With one probe token all distances tie, and a tie is ours to break.
    counts = [8, 1, 8] if probe_tokens == 1 else [5, 2, 3]
    expected = looped_logits(model, tokens, chai_loop(counts, probe_tokens, features=features))
    method = build_method("chai", clusters=counts, probe_tokens=probe_tokens, features=features)
    with method.applied(model):
        found = masked_logits(model, *padded(tokens, "right"))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_branches_of_a_packed_row_equal_each_choice_run_on_its_own(name: str) -> None:
    model = MODELS[name]()
    contexts = requests([6, 5, 30, 12], seed=2)
    branches = [requests(sizes, seed=3) for sizes in ([3, 1, 7], [2], [], [4, 4])]
    rows = Rows.packed([len(each) for each in contexts], [[len(one) for one in each] for each in branches])
    line = torch.cat([torch.cat([context, *after]) for context, after in zip(contexts, branches, strict=True)])
    whole = [
        torch.cat([context, one])
        for context, after in zip(contexts, branches, strict=True)
        for one in (after or [context[:0]])
    ]
    expected = looped_logits(model, whole, chai_loop(COUNTS))
    with build_method("chai", clusters=COUNTS).applied(model), torch.no_grad():
        logits = model(input_ids=line[None], rows=rows).logits[0]
    start, number = 0, 0
    for context, after in zip(contexts, branches, strict=True):
        inside = logits[start : start + len(context)]
        offset = start + len(context)
        for one in after or [context[:0]]:
            ours = torch.cat([inside, logits[offset : offset + len(one)]])
            torch.testing.assert_close(ours, expected[number], atol=TOLERANCE, rtol=0)
            offset, number = offset + len(one), number + 1
        start = offset


@pytest.mark.parametrize("name", MODELS)
def test_score_of_a_request_does_not_depend_on_its_batch(name: str) -> None:
    model = MODELS[name]()
    tokens = requests([3, 17, 9, 31, 6], seed=4)
    with build_method("chai", clusters=COUNTS).applied(model):
        together = masked_logits(model, *padded(tokens, "left"))
        reverse = masked_logits(model, *padded(tokens[::-1], "right"))[::-1]
        alone = [masked_logits(model, *padded([each], "left"))[0] for each in tokens]
    for one, two, three in zip(together, reverse, alone, strict=True):
        torch.testing.assert_close(one, three, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(two, three, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_clusters_as_heads_is_multi_head_attention(name: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(requests([4, 25, 11]), "left")
    expected = masked_logits(model, ids, mask)
    with build_method("chai", clusters=[[8, 3]]).applied(model):
        found = masked_logits(model, ids, mask)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_queries_taken_in_blocks_give_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    ids, mask = padded(requests([50, 33]), "left")
    with build_method("chai", clusters=COUNTS).applied(model):
        whole = masked_logits(model, ids, mask)
        monkeypatch.setattr("chai_eval.attention.kernels.prefill.BLOCK_ELEMENTS", 1000)
        blocked = masked_logits(model, ids, mask)
    for one, two in zip(whole, blocked, strict=True):
        torch.testing.assert_close(one, two, atol=TOLERANCE, rtol=0)
