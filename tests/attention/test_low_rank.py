"""Keys and values in fewer numbers, against PyTorch's own attention in float64 on what these stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Rows, View
from chai_eval.attention.kernels import decode
from chai_eval.attention.low_rank import LayerRanks, LowRank, read_low_rank

HEADS, HEAD_DIM, KEYS, ROOM = 6, 8, 45, 7


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reduction(ranks: list[int], seed: int, dtype: torch.dtype) -> tuple[LowRank, Tensor]:
    """Oblique projections of each head to its rank, also as matrices `[heads, head_dim, head_dim]`."""
    down = torch.eye(HEAD_DIM, dtype=torch.float64) + 0.2 * drawn(len(ranks), HEAD_DIM, HEAD_DIM, seed=seed)
    up = torch.linalg.inv(down).transpose(1, 2)
    matrices = torch.stack([up[head, :rank].T @ down[head, :rank] for head, rank in enumerate(ranks)])
    return LowRank.of(down, up, ranks, torch.zeros(1, dtype=dtype)), matrices


# Numbers of 8 bits are rounded a few times more than in plain attention: as cached, as asked, as brought back.
@pytest.mark.parametrize(
    ("dtype", "multiplied", "tolerance"),
    [(torch.float32, True, 1e-5), (torch.bfloat16, True, 6e-2), (torch.bfloat16, False, 6e-2)],
    ids=["float32", "bfloat16 as it is", "bfloat16 in pieces of float32"],
)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("of_keys", "of_values"),
    [
        ([4] * 6, [8] * 6),
        ([8] * 6, [4] * 6),
        ([8] * 6, [8] * 6),
        ([8, 4, 0, 4, 8, 2], [0, 8, 4, 8, 8, 6]),
        ([0, 0, 0], [8, 0, 8]),
        ([8, 2, 4], [4, 8, 8]),
    ],
    ids=str,
)
def test_a_few_queries_read_what_plain_attention_reads_of_the_keys_and_values_that_are_kept(
    of_keys: list[int], of_values: list[int], queries: int, dtype: torch.dtype, multiplied: bool, tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(decode, "cpu_multiplies", lambda asked: multiplied or asked == torch.float32)
    kv_heads, lengths = len(of_keys), torch.tensor([KEYS, KEYS - 9])
    query = drawn(2, HEADS, queries, HEAD_DIM, seed=0, dtype=dtype)
    key, value = (drawn(2, kv_heads, KEYS, HEAD_DIM, seed=seed, dtype=dtype) for seed in (1, 2))
    (keys, key_matrices), (values, value_matrices) = reduction(of_keys, 3, dtype), reduction(of_values, 4, dtype)
    cached = [torch.zeros(2, maps.numbers, KEYS + ROOM, 1, dtype=dtype) for maps in (keys, values)]
    for buffer, found in zip(cached, (keys.project(key), values.project(value)), strict=True):
        buffer[:, :, :KEYS] = found
    rows = Rows.from_mask(None, 2, queries, query.device).after(lengths - queries, KEYS - queries, aligned=False)
    first = key[:, :, :1]
    out = read_low_rank(LayerRanks(keys, values), query, first, (cached[0], cached[1]), View(rows, 0.3))
    assert out.dtype == dtype
    kept_key = torch.cat((first.double(), key[:, :, 1:].double() @ key_matrices.transpose(1, 2)), 2)
    kept_value = value.double() @ value_matrices.transpose(1, 2)
    seen = torch.arange(KEYS) < (lengths[:, None] - queries + 1 + torch.arange(queries))[..., None]
    expected = scaled_dot_product_attention(
        query.double(),
        *(each.repeat_interleave(HEADS // kv_heads, 1) for each in (kept_key, kept_value)),
        attn_mask=seen[:, None],
        scale=0.3,
    )
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


def test_heads_of_full_rank_are_cached_to_the_bit_whatever_the_others_are() -> None:
    ranks = [8, 4, 8, 0]
    maps, matrices = reduction(ranks, 5, torch.bfloat16)
    states = drawn(2, 4, 9, HEAD_DIM, seed=6, dtype=torch.bfloat16)
    cached = maps.project(states)
    assert cached.shape == (2, sum(ranks), 9, 1)
    restored = maps.restore(cached)
    assert torch.equal(restored[:, ::2], states[:, ::2])
    assert not torch.equal(restored[:, 1], states[:, 1])
    assert torch.count_nonzero(restored[:, 3]) == 0
    torch.testing.assert_close(matrices[0], torch.eye(HEAD_DIM, dtype=torch.float64))
