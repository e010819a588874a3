"""Many queries: a cluster's probabilities meet the values of all its members in one wide matrix product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chai_eval.attention.kernels.decode import multiplies
from chai_eval.attention.membership import Membership
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.view import View

# Queries taken at a time: a block looks only at keys up to its last query, so smaller blocks leave more of what is
# masked uncomputed, and larger ones make wider products.
BLOCK_QUERIES = 256
# Elements of probabilities held at once, over all rows and clusters. In float32 this is 64 MiB.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class SameSize:
    """All clusters of one size m, over all rows, `[n]`, and their members in order, `[n, m]`: one batched product."""

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


def attend(query: Tensor, key: Tensor, value: Tensor, membership: Membership, view: View, first: int) -> Tensor:
    """Output of every head for queries in columns `first` and after: `[rows, heads, queries, head_dim]`.

    Parameters
    ----------
    query : Tensor [rows, clusters, queries, head_dim]
        Of the representatives.
    key : Tensor [rows, clusters, keys, head_dim]
    value : Tensor [rows, kv_heads, keys, head_dim]
    """
    if not multiplies(value.dtype, value.device):
        return attend(query.float(), key.float(), value.float(), membership, view, first).to(value.dtype)
    one_mask = view.chosen is None or view.chosen.shape[1] == 1
    if one_mask and may_write_in_place(value):
        return _attend_one_row(query, key, value, membership, view, first)
    count, queries, rows = query.shape[0], query.shape[2], view.rows
    heads = membership.cluster.shape[1]
    query = query * view.scaling
    out = value.new_empty(count, heads, queries, value.shape[-1])
    values = [_side_by_side(value, group, heads // value.shape[1]) for group in by_size(membership)]
    for start, stop in query_blocks(queries, count * membership.clusters * key.shape[2]):
        keys = rows.key_columns(first + stop)
        scores = query[:, :, start:stop] @ key[:, :, :keys].transpose(-1, -2)
        _hide(scores, view, first + start)
        probabilities = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        block = out[:, :, start:stop]
        for group, beside in values:
            # Where all clusters are of one size they stand in order, and need no copy.
            shared = probabilities.flatten(0, 1) if len(values) == 1 else probabilities[group.row, group.cluster]
            joint = torch.matmul(shared, beside[:, :keys])  # [n, block, m * head_dim]
            split = joint.unflatten(-1, (group.heads.shape[1], -1)).transpose(1, 2)  # [n, m, block, head_dim]
            block[group.row[:, None], group.heads] = split
    return out


def _attend_one_row(
    query: Tensor, key: Tensor, value: Tensor, membership: Membership, view: View, first: int
) -> Tensor:
    """The same for a single request, cluster by cluster, in memory that all clusters use.

    It stays in the processor's caches; and what is freed the allocator may give back to the system, to be paid for
    again in the next call.
    """
    queries, head_dim, rows = query.shape[2], value.shape[-1], view.rows
    keys = rows.key_columns(first + queries)
    cluster = membership.cluster[0].tolist()
    members = [[head for head, of in enumerate(cluster) if of == number] for number in range(membership.clusters)]
    most, heads_per_value = max(map(len, members)), len(cluster) // value.shape[1]
    blocks = list(query_blocks(queries, keys))
    of_cluster, block = query[0] * view.scaling, blocks[0][1] * keys
    score_room, value_room, joint_room = (
        value.new_empty(size) for size in (block, keys * most * head_dim, queries * most * head_dim)
    )
    probability_room = torch.empty_like(score_room, dtype=torch.float32)
    out = value.new_empty(queries, len(cluster), head_dim)
    for number, heads in enumerate(members):
        side_by_side = value_room[: keys * len(heads) * head_dim].view(keys, len(heads), head_dim)
        torch.stack([value[0, head // heads_per_value, :keys] for head in heads], 1, out=side_by_side)
        joint = joint_room[: queries * len(heads) * head_dim].view(queries, -1)
        for start, stop in blocks:
            seen = rows.key_columns(first + stop)
            shape = (stop - start, seen)
            scores = score_room[: math.prod(shape)].view(shape)
            torch.mm(of_cluster[number, start:stop], key[0, number, :seen].T, out=scores)
            _hide(scores[None, None], view, first + start)
            shared = torch.softmax(
                scores, -1, dtype=torch.float32, out=probability_room[: scores.numel()].view(shape)
            ).to(value.dtype)
            torch.mm(shared, side_by_side[:seen].flatten(1), out=joint[start:stop])
        for place, head in enumerate(heads):
            out[:, head].copy_(joint[:, place * head_dim : (place + 1) * head_dim])
    return out.transpose(0, 1)[None]


def _hide(scores: Tensor, view: View, first: int) -> None:
    """Make scores minus infinity where queries in columns `first` and after may not look.

    They are `[rows, n, queries, keys up to the last that these queries may look at]`.
    """
    queries = scores.shape[2]
    if view.causal:  # only the keys that stand among the queries can lie ahead of one
        scores[..., first:].masked_fill_(view.future(queries), float("-inf"))
    else:
        seen = view.mask(first, first + queries)
        assert seen is not None
        scores.masked_fill_(~seen, float("-inf"))


def may_write_in_place(states: Tensor) -> bool:
    """Whether products of these `[rows, ...]` are written in place.

    No gradient passes that, and a GPU is better filled by products of all rows and clusters at once.
    """
    return states.shape[0] == 1 and states.device.type == "cpu" and not torch.is_grad_enabled()


def query_blocks(queries: int, per_query: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `BLOCK_QUERIES`, whose probabilities, `per_query` for each, are at most `BLOCK_ELEMENTS`."""
    size = max(min(BLOCK_ELEMENTS // per_query, BLOCK_QUERIES), 1)
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


def probability_blocks(query: Tensor, key: Tensor, view: View) -> Iterator[tuple[slice, Tensor]]:
    """Every head's own probabilities, a block of queries at a time: `[rows, heads, block, keys]`, float32.

    From queries `[rows, heads, length, head_dim]` and keys `[rows, kv_heads, keys, head_dim]`.
    """
    count, heads, length, _ = query.shape
    own_key, seen = repeat_heads(key, heads).transpose(-1, -2), view.whole_mask()
    for start, stop in query_blocks(length, count * heads * key.shape[2]):
        block = slice(start, stop)
        scores = torch.matmul(query[:, :, block], own_key) * view.scaling
        yield block, scores.masked_fill(~seen[:, :, block], float("-inf")).softmax(-1, dtype=torch.float32)


def _side_by_side(value: Tensor, group: SameSize, queries_per_key: int) -> tuple[SameSize, Tensor]:
    """Values of a cluster's members beside each other: `[n, keys, m * head_dim]`."""
    taken = value[group.row[:, None], group.heads // queries_per_key]  # [n, m, keys, head_dim]
    return group, taken.transpose(1, 2).flatten(-2)
