"""Prefill of a single request, whose products are written in place, against PyTorch's own attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Rows, SharedHeads, View, membership_from_labels, shared_attention
from chai_eval.attention.kernels import prefill

HEADS, HEAD_DIM = 6, 8
# Clusters of uneven size, one of them scattered; for each head the lowest of its cluster.
LOWEST = [0, 1, 0, 3, 1, 0]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "BLOCK_QUERIES", 24)


@pytest.mark.parametrize("length", [17, 24, 48, 61])
@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("grad", [False, True])
def test_equals_plain_attention_with_every_head_asking_as_its_representative(
    length: int, kv_heads: int, first: int, window: int | None, grad: bool
) -> None:
    generator = torch.Generator().manual_seed(length)

    def drawn(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)

    query, key, value = drawn(HEADS, length + first), drawn(HEADS, length + first), drawn(kv_heads, length + first)
    membership = membership_from_labels(torch.tensor([LOWEST]), 3)
    rows = Rows.from_mask(None, 1, length + first, query.device)
    kept = membership.representative[0]
    with torch.set_grad_enabled(grad):
        shared = SharedHeads.of(membership, HEADS)
        found = shared_attention(query[:, kept, first:], key[:, kept], value, shared, View(rows, 0.3, window), first)
    place = torch.arange(length + first)
    behind = place[:, None] - place[None, :]
    seen = (behind >= 0) & (behind < (window or length + first))
    by = torch.tensor(LOWEST)
    expected = scaled_dot_product_attention(
        query[:, by], key[:, by], value.repeat_interleave(HEADS // kv_heads, 1), attn_mask=seen, scale=0.3
    )
    # Both add up at most 66 products in float32.
    torch.testing.assert_close(found, expected[:, :, first:], atol=1e-5, rtol=1e-5)


def test_the_room_behind_the_keys_is_not_looked_at() -> None:
    shared = SharedHeads.of(membership_from_labels(torch.tensor([LOWEST]), 3), HEADS)
    view = View(Rows.from_mask(None, 1, 30, torch.device("cpu")), 0.3)
    query, key, value = (torch.randn(1, heads, 30, HEAD_DIM) for heads in (3, 3, HEADS))
    room = torch.full((1, HEADS, 10, HEAD_DIM), torch.nan)
    with torch.no_grad():
        exact = shared_attention(query, key, value, shared, view)
        found = shared_attention(query, torch.cat((key, room[:, :3]), 2), torch.cat((value, room), 2), shared, view)
    assert torch.equal(found, exact)


def test_low_precision_rounds_a_sum_once() -> None:
    generator = torch.Generator().manual_seed(0)
    membership = membership_from_labels(torch.tensor([LOWEST]), 3)
    view, two = (View(Rows.from_mask(None, rows, 61, torch.device("cpu")), 0.3) for rows in (1, 2))
    query, key, value = (torch.randn(1, n, 61, HEAD_DIM, generator=generator).bfloat16() for n in (3, 3, HEADS))
    with torch.no_grad():
        alone = shared_attention(query, key, value, SharedHeads.of(membership, HEADS), view)
    shared = SharedHeads.of(membership.changed(lambda each: each.expand(2, -1)), HEADS)
    together = shared_attention(*(each.expand(2, -1, -1, -1) for each in (query, key, value)), shared, two)
    # Of a single rounding of the same sum to 8 bits, but for sums that lie at the edge of two.
    assert (alone[0] == together[0]).float().mean() > 0.99
