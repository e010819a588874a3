"""Attention over rows: every head on its own, or one representative's probabilities shared by its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention.membership import Membership
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.rows import Rows

# Elements of probabilities held at once; queries are taken in blocks so that they fit. In float32 this is 64 MiB.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class SameSize:
    """All clusters of one size m, over all rows: they can be computed in one batched product.

    Attributes
    ----------
    row, cluster : Tensor [n], int64
    heads : Tensor [n, m], int64
        The members, in order.
    """

    row: Tensor
    cluster: Tensor
    heads: Tensor


def by_size(membership: Membership) -> list[SameSize]:
    """Group the clusters of all rows by how many heads they have; few sizes occur, whatever the number of rows."""
    device = membership.cluster.device
    order = torch.argsort(membership.cluster, dim=1, stable=True)
    number = torch.arange(membership.clusters, device=device)
    sizes = (membership.cluster[:, None, :] == number[:, None]).sum(-1)  # [rows, clusters]
    starts = sizes.cumsum(1) - sizes
    groups = []
    for size in torch.unique(sizes).tolist():
        row, cluster = torch.nonzero(sizes == size, as_tuple=True)
        column = starts[row, cluster, None] + torch.arange(size, device=device)
        groups.append(SameSize(row, cluster, order[row[:, None], column]))
    return groups


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float, window: int | None = None
) -> Tensor:
    """Multi-head attention of every row, each head with its own scores.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, keys, head_dim]
        `keys` is `length`, or more where the pass goes on from a cache.

    Returns
    -------
    Tensor [rows, heads, length, head_dim]
    """
    heads, length = query.shape[1], query.shape[2]
    mask = rows.visible(0, length, window)
    return scaled_dot_product_attention(
        query,
        repeat_heads(key, heads),
        repeat_heads(value, heads),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    membership: Membership,
    rows: Rows,
    scaling: float,
    *,
    first: int = 0,
    window: int | None = None,
    share_value: bool = False,
) -> Tensor:
    """Attention in which each head uses its representative's probabilities with its own values.

    The probabilities of a cluster are computed once. They meet the values of all members, laid side by side, in one
    matrix product, so nothing of size heads × queries × keys is ever written.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, keys, head_dim]
        `keys` is `length`, or more where the pass goes on from a cache.
    membership : Membership
        Of every row.
    first : int
        First column whose queries are wanted; earlier columns are keys only.
    share_value : bool
        Members take their representative's values too, so its whole output.

    Returns
    -------
    Tensor [rows, heads, length - first, head_dim]
    """
    count, heads, length, _ = query.shape
    groups_of_heads = heads // key.shape[1]
    row = torch.arange(count, device=query.device)[:, None]
    representative = membership.representative
    kept_query = query[row, representative]  # [rows, clusters, length, head_dim]
    kept_key = key[row, representative // groups_of_heads]
    out = value.new_empty(count, heads, length - first, value.shape[-1])
    if share_value:
        own = value[row, representative // groups_of_heads]
    else:
        values = [_side_by_side(value, group, groups_of_heads) for group in by_size(membership)]
    for start, stop in _query_blocks(first, length, count * membership.clusters * key.shape[2]):
        seen_keys = rows.key_columns(stop)
        scores = torch.matmul(kept_query[:, :, start:stop], kept_key[:, :, :seen_keys].transpose(-1, -2)) * scaling
        scores = scores.masked_fill(~_seen(rows, start, stop, window), float("-inf"))
        probabilities = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        block = out[:, :, start - first : stop - first]
        if share_value:
            shared = torch.matmul(probabilities, own[:, :, :seen_keys])
            block.copy_(shared.gather(1, membership.cluster[:, :, None, None].expand_as(block)))
            continue
        for group, beside in values:
            joint = torch.matmul(
                probabilities[group.row, group.cluster], beside[:, :seen_keys]
            )  # [n, block, m * head_dim]
            split = joint.unflatten(-1, (group.heads.shape[1], -1)).transpose(1, 2)  # [n, m, block, head_dim]
            block[group.row[:, None], group.heads] = split
    return out


def _side_by_side(value: Tensor, group: SameSize, groups_of_heads: int) -> tuple[SameSize, Tensor]:
    """Values of a cluster's members beside each other: `[n, length, m * head_dim]`."""
    taken = value[group.row[:, None], group.heads // groups_of_heads]  # [n, m, length, head_dim]
    return group, taken.transpose(1, 2).flatten(-2)


def _query_blocks(first: int, length: int, per_query: int) -> Iterator[tuple[int, int]]:
    """Column ranges from `first` to `length`; one with `per_query` probabilities a column fits `BLOCK_ELEMENTS`."""
    size = max(BLOCK_ELEMENTS // per_query, 1)
    for start in range(first, length, size):
        yield start, min(start + size, length)


def _seen(rows: Rows, start: int, stop: int, window: int | None) -> Tensor:
    seen = rows.visible(start, stop, window)
    if seen is not None:
        return seen
    return torch.ones(stop, stop, dtype=torch.bool, device=rows.lengths.device).tril()[None, None]
