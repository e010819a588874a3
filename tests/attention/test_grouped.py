"""Where heads share keys and values: PyTorch's results, without a copy of either for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chai_eval.attention.layer import FEW_QUERIES, full_attention, shared_attention
from chai_eval.attention.membership import membership_from_labels
from chai_eval.attention.rows import Rows
from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.view import View

HEADS, HEAD_DIM = 6, 16


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages that operations give and were not given."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.nbytes += each.untyped_storage().nbytes()
        return out


def going_on(lengths: list[int], queries: int) -> Rows:
    past = torch.tensor(lengths)
    rows = Rows.from_mask(None, len(lengths), queries, past.device)
    return rows.after(past, int(past.max()), aligned=len(set(lengths)) == 1)


def drawn(rows: int, heads: int, length: int) -> Tensor:
    return torch.randn(rows, heads, length, HEAD_DIM, generator=torch.Generator().manual_seed(heads + length))


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("queries", [1, 3, FEW_QUERIES + 1])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", [[20, 20], [20, 13]])
def test_queries_after_a_cache_equal_pytorchs_grouped_attention(
    kv_heads: int, queries: int, window: int | None, lengths: list[int]
) -> None:
    rows = going_on(lengths, queries)
    width = max(lengths) + queries
    query, key, value = drawn(2, HEADS, queries), drawn(2, kv_heads, width), drawn(2, kv_heads, width + 1)[:, :, :width]
    at = torch.tensor(lengths)[:, None, None] + torch.arange(queries)[:, None]
    seen = torch.arange(width) <= at
    if window is not None:
        seen &= at - torch.arange(width) < window
    found = full_attention(query, key, value, View(rows, 0.3, window))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None], scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # float32, sums of at most 37 numbers of about 1


SLOT = torch.tensor([[1, 0, 1]])


def every_head(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    return full_attention(query, key, value, View(rows, 0.3))


def representatives(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    membership = membership_from_labels(torch.tensor([[0, 0, 2, 2, 2, 5]]), 3)
    shared = SharedHeads(membership, torch.arange(2)[None], SLOT, share_value=True)
    return shared_attention(query[:, [0, 2, 5]], key, value, shared, View(rows, 0.3))


@pytest.mark.parametrize("attend", [every_head, representatives])
def test_a_new_token_copies_no_keys_or_values_that_heads_share(attend: Callable[..., Tensor]) -> None:
    def allocated(length: int) -> int:
        query, key, value = drawn(1, HEADS, 1), drawn(1, 2, length + 1), drawn(1, 2, length + 1)
        rows = going_on([length], 1)
        with torch.no_grad(), Allocated() as counted:
            attend(query, key, value, rows)
        return counted.nbytes

    # Not even one key for each token of the cache: what grows is a few numbers a head, scores and probabilities.
    assert allocated(400) - allocated(200) < 200 * HEAD_DIM * 4


@pytest.mark.parametrize("queries", [1, 3, FEW_QUERIES + 1])
def test_outputs_that_a_cluster_shares_are_its_representatives(queries: int) -> None:
    rows = going_on([20], queries)
    query, key, value = drawn(1, HEADS, queries), drawn(1, 2, 20 + queries), drawn(1, 2, 20 + queries)
    seen = torch.arange(20 + queries) <= 20 + torch.arange(queries)[:, None]
    alone = scaled_dot_product_attention(
        query[:, [0, 2, 5]], key[:, SLOT[0]], value[:, SLOT[0]], attn_mask=seen, scale=0.3
    )
    found = representatives(query, key, value, rows)
    torch.testing.assert_close(found, alone[:, [0, 0, 1, 1, 1, 2]], atol=1e-5, rtol=0)
