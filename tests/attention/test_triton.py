"""GPU kernels under triton's interpreter, against loops over rows, heads and queries in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Chunk, Rows, SharedHeads, View, membership_from_labels
from chai_eval.attention.kernels.triton_arguments import Columns, Heads, Tuning
from tests.attention.tiny import padded, requests
from tests.attention.triton_worker import called, generated, worker

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ROWS, HEADS, CLUSTERS, ROOM = 2, 4, 2, 48
# Clusters of three heads and of one, other ones in the second row; rows of different length.
CLUSTER = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1]])
PAST = torch.tensor([36, 21])
# A place of each precision: the interpreter cuts what is beyond off bfloat16, where a GPU rounds to the nearest.
PLACE = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    with worker(TRITON_INTERPRET="1", OMP_NUM_THREADS="1") as call:
        yield call


@pytest.fixture
def interpreted(interpreter: Callable[..., Any]) -> Callable[..., Any]:
    return partial(interpreter, called)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def states(queries: int, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys of representatives and values; behind the columns in use there is what must not be read."""
    key, value = drawn(ROWS, CLUSTERS, ROOM, widths[0], seed=1), drawn(ROWS, kv_heads, ROOM, widths[1], seed=2)
    for row, past in enumerate(PAST):
        for each in (key, value):
            each[row, :, past + queries :] = torch.nan
    return [each.to(dtype) for each in (drawn(ROWS, CLUSTERS, queries, widths[0]), key, value)]


def loops(query: Tensor, key: Tensor, value: Tensor, heads: Heads, columns: Columns) -> tuple[Tensor, Tensor]:
    """Every head's output in float64, and the sums of what was added up, without signs."""
    query, key, value = (each.double() for each in (query, key, value))
    rows, count, queries = len(query), (query if heads.cluster is None else heads.cluster).shape[1], query.shape[2]
    out = torch.empty(2, rows, count, queries, value.shape[3], dtype=torch.float64)
    for row in range(rows):
        for head in range(count):
            cluster = head if heads.cluster is None else int(heads.cluster[row, head])
            kept = cluster if heads.slot is None else int(heads.slot[row, cluster])
            read = head // (count // value.shape[1]) if heads.value is None else int(heads.value[row, head])
            for number in range(queries):
                place = columns.first + number + (0 if columns.past is None else int(columns.past[row]))
                window = columns.window
                begin = place // window.size * window.size if isinstance(window, Chunk) else place + 1 - (window or 999)
                seen = slice(max(begin, 0), place + 1)
                probabilities = (key[row, kept, seen] @ query[row, cluster, number] * columns.scale).softmax(0)
                weighed = probabilities[:, None] * value[row, read, seen]
                out[:, row, head, number] = torch.stack((weighed.sum(0), weighed.abs().sum(0)))
    return out[0], out[1]


def check(found: Tensor, expected: tuple[Tensor, Tensor], dtype: torch.dtype, matrices: bool) -> None:
    """Equal within 1e-5 in float32; in low precision up to one rounding of the output, and one of what is multiplied.

    Matrix units take probabilities in the precision of values.
    """
    out, summed = expected
    assert found.dtype == dtype
    low = dtype != torch.float32
    allowed = 1e-5 + low * PLACE[dtype] * (out.abs() + matrices * summed)
    error = (found.double() - out).abs()
    assert (error <= allowed).all(), error.max()  # which what is no number fails too


@pytest.mark.parametrize("dtype", PLACE, ids=str)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("widths", [(8, 8), (4, 8)], ids=str)
def test_a_decoded_token_equals_loops(
    interpreted: Callable[..., Any], dtype: torch.dtype, window: int | None, kv_heads: int, widths: tuple[int, int]
) -> None:
    given, columns = states(1, kv_heads, widths, dtype), Columns(0.6, PAST, window=window)
    heads = Heads(CLUSTER)
    expected = loops(*given, heads, columns)
    splits = 1 if (window is None) == (kv_heads == 4) else 2
    tuning = Tuning(1, 1, 16, splits, matrices=False)
    check(interpreted("triton_decode", "indirect", *given, heads, columns, tuning), expected, dtype, False)
    # A cluster of three takes two programs then.
    tuning = replace(tuning, members=2, splits=3 - splits)
    check(interpreted("triton_decode", "fused", *given, heads, columns, tuning), expected, dtype, False)
    # Members share values too: there are those of representatives alone.
    own = torch.tensor([[1, 0], [0, 1]])
    given[2], heads = given[2][:, :2], Heads(slot=own, value=own)
    tuning = replace(tuning, members=1)
    found = interpreted("triton_decode", "indirect", *given, heads, columns, tuning)
    check(found, loops(*given, heads, columns), dtype, False)


@pytest.mark.parametrize("dtype", PLACE, ids=str)
@pytest.mark.parametrize("window", [7, Chunk(9)], ids=str)
@pytest.mark.parametrize("members", [1, 2])
def test_a_few_queries_by_matrix_products_equal_loops(
    interpreted: Callable[..., Any], dtype: torch.dtype, window: int | Chunk, members: int
) -> None:
    given, heads = states(3, 2, (4, 8), dtype), Heads(CLUSTER)
    columns = Columns(0.6, PAST, window=window)
    tuning = Tuning(members, 16, 16, 2)
    found = interpreted("triton_decode", "fused" if members > 1 else "indirect", *given, heads, columns, tuning)
    check(found, loops(*given, heads, columns), dtype, True)


@pytest.mark.parametrize("dtype", PLACE, ids=str)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("members", "first"), [(1, 0), (2, 5), (4, 0)])
def test_a_prompt_equals_loops(
    interpreted: Callable[..., Any], dtype: torch.dtype, window: int | None, members: int, first: int
) -> None:
    query, key, value = (drawn(ROWS, n, 27, 8, dtype=dtype, seed=n) for n in (CLUSTERS, 3, 2))
    given = (query[:, :, first:], key, value)
    heads, columns = Heads(CLUSTER, torch.tensor([[2, 0], [1, 2]])), Columns(0.6, None, first, window)
    found = interpreted("triton_prefill", "prompt", *given, heads, columns, Tuning(members, 16, 16))
    check(found, loops(*given, heads, columns), dtype, True)


def test_heads_that_share_nothing_have_the_attention_of_pytorch(interpreted: Callable[..., Any]) -> None:
    query, key, value = (drawn(1, 3, 35, 16, seed=seed) for seed in range(3))
    heads, columns, scale = Heads(torch.arange(3)[None]), Columns(0.25), 0.25
    found = interpreted("triton_prefill", "prompt", query, key, value, heads, columns, Tuning(1, 16, 16))
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    columns = Columns(scale, torch.tensor([34]))
    for tuning in (Tuning(1, 1, 16, 3, matrices=False), Tuning(1, 16, 16, 1)):
        found = interpreted("triton_decode", "indirect", query[:, :, -1:], key, value, heads, columns, tuning)
        torch.testing.assert_close(found, expected[:, :, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("members", [1, 2])
def test_rows_are_read_from_pages_in_any_order(interpreted: Callable[..., Any], members: int) -> None:
    given, columns, page = states(1, 4, (4, 8), torch.float32), Columns(0.6, PAST), 8
    # Page n of row r lies at place (5 n + 3 r) mod 12 of all: rows have 6 pages each.
    place = (5 * torch.arange(12) % 12).view(ROWS, -1)
    paged = [given[0]]
    for each in given[1:]:
        pages = torch.empty(12, each.shape[1], page, each.shape[3])
        pages[place] = each.unflatten(2, (-1, page)).transpose(1, 2)
        paged.append(pages)
    name, tuning = ("fused" if members > 1 else "indirect"), Tuning(members, 1, 16, 2, matrices=False)
    found = interpreted("triton_decode", name, *paged, Heads(CLUSTER, pages=place), columns, tuning)
    check(found, loops(*given, Heads(CLUSTER), columns), torch.float32, False)


def test_keys_that_lie_tokens_side_by_side_are_read_where_they_are_with_the_first_score_given(
    interpreted: Callable[..., Any],
) -> None:
    query, key, value = states(1, 4, (4, 8), torch.float32)
    lying = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (key, value)]
    first = drawn(ROWS, CLUSTERS, 1, seed=7)
    exact = key.clone()
    exact[:, :, 0] = query[:, :, 0] * (first / query.square().sum(3))  # whose products are what is given
    columns, tuning = Columns(0.6, PAST), Tuning(1, 1, 16, 2, matrices=False)
    found = interpreted(
        "triton_decode", "indirect", query, *lying, Heads(CLUSTER), replace(columns, first_score=first), tuning
    )
    check(found, loops(query, exact, value, Heads(CLUSTER), columns), torch.float32, False)


@pytest.mark.parametrize("share_value", [False, True])
@pytest.mark.parametrize(("queries", "window"), [(1, None), (1, 7), (3, 7), (20, None)])
def test_attention_of_a_view_is_that_of_pytorch_s_kernels(
    interpreted: Callable[..., Any], queries: int, window: int | None, share_value: bool
) -> None:
    from chai_eval.attention import shared_attention
    from chai_eval.attention.sharing import heads_of

    membership = membership_from_labels(torch.tensor([[0, 1, 0, 3], [0, 0, 2, 2]])[:, [0, 1, 2, 0]], 2)
    shared = SharedHeads.of(membership, 2, share_value=share_value)
    assert shared.slot is not None
    rows = Rows.from_mask(None, ROWS, queries, torch.device("cpu"))
    rows = rows.after(PAST - 7, 29, aligned=False) if queries < 20 else rows
    width = rows.key_columns(queries)
    key, value = (drawn(ROWS, 2, width + 3, 8, seed=seed) for seed in (1, 2))
    key = heads_of(key, shared.key_heads)
    value = heads_of(value, shared.value_heads)
    given = (drawn(ROWS, 2, queries, 8), key, value, shared, View(rows, 0.4, window))
    found = interpreted("gpu", "attend", *given, 0)
    if share_value:
        found = heads_of(found, membership.cluster)
    with torch.no_grad():
        torch.testing.assert_close(found, shared_attention(*given), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model", "method"), [("llama", "chai"), ("llama_gqa", "v_reuse")])
def test_a_model_generates_by_the_kernels_what_it_generates_by_pytorch_s(
    interpreter: Callable[..., Any], model: str, method: str
) -> None:
    ids, mask = padded(requests([19, 23]), "left")
    batch = {"input_ids": ids, "attention_mask": mask}
    settings = {"clusters": [3, 8, 2]}
    found, calls = interpreter(partial(generated, model, method, settings, batch, kernels=True))
    expected, none = generated(model, method, settings, batch, kernels=False)
    assert (calls, none) == (2 * 3, 0)  # two layers are clustered, in a prompt and two tokens
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
