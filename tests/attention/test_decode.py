"""Few queries against many keys, against PyTorch's own attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Rows, SharedHeads, View, membership_from_labels, shared_attention
from chai_eval.attention.kernels import decode

HEADS, HEAD_DIM = 6, 8
# Clusters of uneven size, other ones in the second row.
LOWEST = torch.tensor([[0, 1, 0, 3, 1, 0], [0, 0, 2, 2, 4, 2]])


@pytest.fixture(params=[True, False], ids=["as they are", "in pieces of float32"])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Take either way, whatever this processor has; pieces so small that heads and keys are cut, and unevenly."""
    monkeypatch.setattr(decode, "cpu_multiplies", lambda dtype: request.param or dtype == torch.float32)
    monkeypatch.setattr(decode, "HEADS", 5)
    monkeypatch.setattr(decode, "PIECE", 5 * HEAD_DIM * 13)
    return not request.param


# Numbers of 8 and 11 bits are rounded at most three times: scores, probabilities and outputs of about 1.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_equals_plain_attention_in_every_precision(
    in_pieces: bool, dtype: torch.dtype, tolerance: float, queries: int, kv_heads: int, grad: bool
) -> None:
    generator = torch.Generator().manual_seed(queries)
    keys, room = 45, 7

    def drawn(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, HEAD_DIM, generator=generator).to(dtype)

    query, key, value = drawn(HEADS, queries), drawn(kv_heads, keys), drawn(kv_heads, keys)
    membership = membership_from_labels(LOWEST, 3)
    row, per_key = torch.arange(2)[:, None], HEADS // kv_heads
    rows = Rows.from_mask(None, 2, queries, query.device).after(
        torch.full((2,), keys - queries), keys - queries, aligned=True
    )
    free = torch.zeros(2, kv_heads, room, HEAD_DIM, dtype=dtype)
    read = membership.representative // per_key
    shared = (
        SharedHeads(membership, torch.arange(3).expand(2, 3), read) if per_key == 2 else SharedHeads.of(membership, 6)
    )
    kept_key = key[row, shared.key_heads]
    with torch.set_grad_enabled(grad):
        found = shared_attention(
            query[row, membership.representative],
            torch.cat((kept_key, free[:, :3]), 2),
            torch.cat((value, free), 2),
            shared,
            View(rows, 0.3),
        )
    assert found.dtype == dtype
    seen = torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]
    exact_query, exact_key, exact_value = (each.double() for each in (query, key, value))
    expected = scaled_dot_product_attention(
        exact_query[row, LOWEST],
        exact_key[row, LOWEST // per_key],
        exact_value.repeat_interleave(per_key, 1),
        attn_mask=seen,
        scale=0.3,
    )
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_gradients_go_through_pieces(in_pieces: bool) -> None:
    key = torch.randn(3, 20, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
    query = torch.randn(3, 1, HEAD_DIM, dtype=torch.bfloat16)
    decode.with_keys(query, key).sum().backward()
    expected = query.expand(-1, 20, -1)
    torch.testing.assert_close(key.grad, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_prompt_is_computed_in_float32_where_the_processor_has_no_low_precision(in_pieces: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    membership = membership_from_labels(LOWEST[:rows], 3)
    query, key, value = (
        torch.randn(rows, heads, 40, HEAD_DIM, generator=generator).bfloat16() for heads in (3, 3, HEADS)
    )
    with torch.no_grad():
        view = View(Rows.from_mask(None, rows, 40, torch.device("cpu")), 0.3)
        found = shared_attention(query, key, value, SharedHeads.of(membership, HEADS), view)
    by = membership.cluster
    row = torch.arange(rows)[:, None]
    expected = scaled_dot_product_attention(
        query.double()[row, by], key.double()[row, by], value.double(), is_causal=True, scale=0.3
    )
    error = (found.double() - expected).abs()
    # In float32 nothing but the output is rounded, to 8 bits.
    assert (error <= (2**-8 * expected.abs() + 1e-5 if in_pieces else 3e-2)).all()
