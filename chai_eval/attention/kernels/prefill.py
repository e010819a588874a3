"""Many queries: a cluster's probabilities meet the values of all its members in one wide matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chai_eval.attention.membership import Membership
from chai_eval.attention.rows import Rows

# Queries taken at a time: a block looks only at keys up to its last query, so smaller blocks leave more of what is
# masked uncomputed, and larger ones make wider products.
BLOCK_QUERIES = 256
# The same where squares above the diagonal are left out, down to so many queries: a larger block then wastes nothing.
WIDE_BLOCK_QUERIES, TRIANGLE_QUERIES = 512, 64
# Queries whose products with keys are computed at a time, where those ahead are left out.
SCORE_QUERIES = 128
# Elements of probabilities held at once, over all rows and clusters. In float32 this is 64 MiB.
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


def attend(
    kept_query: Tensor,
    kept_key: Tensor,
    value: Tensor,
    membership: Membership,
    rows: Rows,
    scaling: float,
    first: int,
    window: int | None,
) -> Tensor:
    """Output of every head for queries in columns `first` and after.

    Parameters
    ----------
    kept_query : Tensor [rows, clusters, queries, head_dim]
        Of the representatives, from column `first` on.
    kept_key : Tensor [rows, clusters, keys, head_dim]
    value : Tensor [rows, kv_heads, keys, head_dim]

    Returns
    -------
    Tensor [rows, heads, queries, head_dim]
    """
    count, queries = kept_query.shape[0], kept_query.shape[2]
    heads = membership.cluster.shape[1]
    if may_write_in_place(value):
        return _attend_one_row(kept_query, kept_key, value, membership, rows, scaling, first, window)
    out = value.new_empty(count, heads, queries, value.shape[-1])
    values = [_side_by_side(value, group, heads // value.shape[1]) for group in by_size(membership)]
    for start, stop, probabilities in probability_blocks(
        kept_query * scaling, kept_key, rows, first, window, BLOCK_QUERIES
    ):
        keys, block = probabilities.shape[-1], out[:, :, start:stop]
        for group, beside in values:
            # Where all clusters are of one size they stand in order, and need no copy.
            shared = probabilities.flatten(0, 1) if len(values) == 1 else probabilities[group.row, group.cluster]
            joint = torch.matmul(shared, beside[:, :keys])  # [n, block, m * head_dim]
            split = joint.unflatten(-1, (group.heads.shape[1], -1)).transpose(1, 2)  # [n, m, block, head_dim]
            block[group.row[:, None], group.heads] = split
    return out


def _attend_one_row(
    kept_query: Tensor,
    kept_key: Tensor,
    value: Tensor,
    membership: Membership,
    rows: Rows,
    scaling: float,
    first: int,
    window: int | None,
) -> Tensor:
    """The same for a single request, cluster by cluster, so that what is held besides the output stays small.

    Memory that a call frees, the allocator may give back to the system; the next call then pays to get it again.
    """
    queries, head_dim = kept_query.shape[2], value.shape[-1]
    cluster, query = membership.cluster[0], kept_query * scaling
    keys_per_token = value[0, :, : rows.key_columns(first + queries)].transpose(0, 1)  # [keys, kv_heads, head_dim]
    out = value.new_empty(queries, len(cluster), head_dim)
    # Added up in parts, a sum in low precision would be rounded several times.
    in_parts = rows.plain(window) and out.dtype == torch.float32
    most = WIDE_BLOCK_QUERIES if in_parts else BLOCK_QUERIES
    for number in range(membership.clusters):
        heads = torch.nonzero(cluster == number).flatten()
        values = keys_per_token[:, heads // (len(cluster) // value.shape[1])].flatten(1)  # [keys, m * head_dim]
        joint = value.new_empty(queries, values.shape[1])
        own_query, own_key = query[:, number : number + 1], kept_key[:, number : number + 1]
        for start, stop, probabilities in probability_blocks(own_query, own_key, rows, first, window, most):
            shared, keys = probabilities[0, 0], probabilities.shape[-1]
            everyone = first + start if in_parts else keys  # keys that all queries of the block may look at
            torch.mm(shared[:, :everyone], values[:everyone], out=joint[start:stop])
            _add_triangle(shared[:, everyone:], values[everyone:keys], joint[start:stop])
        out.index_copy_(1, heads, joint.unflatten(1, (len(heads), head_dim)))
    return out.transpose(0, 1)[None]


def _add_triangle(shared: Tensor, values: Tensor, out: Tensor) -> None:
    """Add `shared @ values` to `out`, where `shared` is zero above its diagonal, or has no columns."""
    queries = shared.shape[0]
    if shared.shape[1] < queries:
        return
    if queries <= TRIANGLE_QUERIES:
        torch.addmm(out, shared, values, out=out)
        return
    half = queries // 2
    _add_triangle(shared[:half, :half], values[:half], out[:half])
    torch.addmm(out[half:], shared[half:, :half], values[:half], out=out[half:])
    _add_triangle(shared[half:, half:], values[half:], out[half:])


def probability_blocks(
    query: Tensor, key: Tensor, rows: Rows, first: int, window: int | None, most: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Probabilities of the representatives, block of queries by block, in the precision of the keys.

    Parameters
    ----------
    query : Tensor [rows, clusters, queries, head_dim]
        From column `first` on, scaled.
    key : Tensor [rows, clusters, keys, head_dim]
    most : int
        Queries of a block.

    Yields
    ------
    start, stop : int
        The block's queries among those given.
    probabilities : Tensor [rows, clusters, stop - start, keys up to the last that the block may look at]
    """
    count, clusters, queries, _ = query.shape
    for start, stop in query_blocks(queries, count * clusters * key.shape[2], most):
        seen = key[:, :, : rows.key_columns(first + stop)]
        yield start, stop, block_probabilities(query[:, :, start:stop], seen, rows, first + start, window).to(key.dtype)


def block_probabilities(query: Tensor, key: Tensor, rows: Rows, first: int, window: int | None) -> Tensor:
    """Masked softmax of some queries over the keys that they may look at, in float32.

    Parameters
    ----------
    query : Tensor [rows, n, queries, head_dim]
        Columns `first` and after, scaled.
    key : Tensor [rows, n, keys, head_dim]
    """
    queries, last = query.shape[2], first + query.shape[2]
    plain = rows.plain(window)
    scores = (
        _scores_in_steps(query, key, first) if plain and may_write_in_place(query) else query @ key.transpose(-1, -2)
    )
    if plain:  # only the keys that stand among the queries can lie ahead of one
        scores[..., first:].masked_fill_(rows.ahead(queries, key.device), float("-inf"))
    else:
        seen = rows.visible(first, last, window)
        assert seen is not None
        scores.masked_fill_(~seen, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32)


def _scores_in_steps(query: Tensor, key: Tensor, first: int) -> Tensor:
    """Products of the queries with the keys up to them, in steps; what lies ahead of a step is left undefined.

    Parameters
    ----------
    query, key
        As in `block_probabilities`, of one row.
    """
    queries = query.shape[2]
    scores = query.new_empty(*query.shape[:3], key.shape[2])
    for start in range(0, queries, SCORE_QUERIES):
        step = slice(start, start + SCORE_QUERIES)
        keys = first + min(step.stop, queries)
        for each, by_query, by_key in zip(scores[0], query[0], key[0], strict=True):
            torch.mm(by_query[step], by_key[:keys].T, out=each[step, :keys])
    return scores


def may_write_in_place(states: Tensor) -> bool:
    """Whether products of these `[rows, ...]` are written in place.

    No gradient passes that, and a GPU is better filled by products of all rows and clusters at once.
    """
    return states.shape[0] == 1 and states.device.type == "cpu" and not torch.is_grad_enabled()


def query_blocks(queries: int, per_query: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` queries, whose probabilities, `per_query` for each, are at most `BLOCK_ELEMENTS`."""
    size = max(min(BLOCK_ELEMENTS // per_query, most), 1)
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


def _side_by_side(value: Tensor, group: SameSize, queries_per_key: int) -> tuple[SameSize, Tensor]:
    """Values of a cluster's members beside each other: `[n, keys, m * head_dim]`."""
    taken = value[group.row[:, None], group.heads // queries_per_key]  # [n, m, keys, head_dim]
    return group, taken.transpose(1, 2).flatten(-2)
