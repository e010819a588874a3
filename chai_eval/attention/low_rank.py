"""Keys and values in fewer numbers: of each head only its coordinates in a chosen subspace are cached and multiplied.

A head's key k is cached as `down k`, r numbers in place of head_dim, and stands for `upᵀ down k`. Its product with a
query is that of `up q` with what is cached, so keys are never restored where few queries read them. Values are cached
alike; what probabilities give of them is brought back once for each query.

Numbers are cached as rows of their own, tokens side by side: heads of different rank then lie one behind the other in
one tensor without a gap, and each is read as a matrix where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chai_eval.attention.kernels.decode import reads_whole, softmax_of_seen, with_keys, with_values
from chai_eval.attention.layer import FEW_QUERIES, full_attention, stored
from chai_eval.attention.row_layer import FIRST_KEY, RowLayer
from chai_eval.attention.rows import Rows
from chai_eval.attention.sources import Source
from chai_eval.attention.view import View


@dataclass(frozen=True)
class SameRank:
    """Heads of one rank.

    Attributes
    ----------
    heads : Tensor [n], int64
    rank : int
    down, up : Tensor [n, rank, head_dim], or None
        None where the rank is `head_dim`: numbers are then cached as they are.
    """

    heads: Tensor
    rank: int
    down: Tensor | None = None
    up: Tensor | None = None

    @property
    def numbers(self) -> int:
        """How many are cached of a token, all heads together."""
        return len(self.heads) * self.rank

    def reduced(self, states: Tensor) -> Tensor:
        """What is cached of the heads' keys or values: `[..., n, length, head_dim]` to `[..., n, rank, length]`."""
        columns = states.transpose(-1, -2)
        return columns if self.down is None else torch.matmul(self.down, columns)

    def asking(self, query: Tensor) -> Tensor:
        """Queries as they meet what is cached of keys: `[..., n, queries, head_dim]` to `[..., n, queries, rank]`."""
        return query if self.up is None else torch.matmul(query, self.up.transpose(-1, -2))

    def whole(self, reduced: Tensor) -> Tensor:
        """What cached numbers, or sums of them, stand for: `[..., n, length, rank]` to `[..., n, length, head_dim]`."""
        return reduced if self.up is None else torch.matmul(reduced, self.up)


@dataclass(frozen=True)
class LowRank:
    """How the key heads, or the value heads, of a layer are cached.

    Attributes
    ----------
    heads : int
        Of the layer, those of rank 0 included.
    head_dim : int
    groups : tuple of SameRank
        In the order in which they are cached; heads of rank 0 are in none.
    """

    heads: int
    head_dim: int
    groups: tuple[SameRank, ...]

    @classmethod
    def of(cls, down: Tensor, up: Tensor, ranks: Sequence[int], like: Tensor) -> LowRank:
        """The first `ranks` rows of each head's maps, in coordinates whose axes are orthonormal in keys and values.

        Parameters
        ----------
        down, up : Tensor [heads, head_dim, head_dim], float64
            All rows together change nothing: `upᵀ down` is 1.
        ranks : sequence of int
        like : Tensor
            Whose precision and device the maps get.
        """
        of_rank = {rank: [head for head, own in enumerate(ranks) if own == rank] for rank in sorted({*ranks} - {0})}
        groups = []
        for rank, heads in of_rank.items():
            where = torch.tensor(heads, device=like.device)
            if rank == down.shape[-1]:
                groups.append(SameRank(where, rank))
                continue
            # Along orthonormal axes nothing that is cached or asked is larger than what it stands for.
            axes, mixed = torch.linalg.qr(up[heads, :rank].transpose(-1, -2))
            maps = (torch.matmul(mixed, down[heads, :rank]), axes.transpose(-1, -2).contiguous())
            groups.append(SameRank(where, rank, *(each.to(like) for each in maps)))
        return cls(len(ranks), down.shape[-1], tuple(groups))

    @property
    def numbers(self) -> int:
        """How many are cached of a token."""
        return sum(group.numbers for group in self.groups)

    def project(self, states: Tensor) -> Tensor:
        """What is cached of keys or values: `[rows, heads, length, head_dim]` to `[rows, numbers, length, 1]`."""
        parts = [group.reduced(states[:, group.heads]) for group in self.groups]
        flat = [part.flatten(1, 2) for part in parts] or [states.new_empty(len(states), 0, states.shape[2])]
        return torch.cat(flat, dim=1)[..., None]

    def restore(self, cached: Tensor) -> Tensor:
        """The keys or values that cached numbers stand for: `[rows, heads, keys, head_dim]`.

        Parameters
        ----------
        cached : Tensor [rows, numbers, keys, 1]
        """
        out = cached.new_zeros(cached.shape[0], self.heads, cached.shape[2], self.head_dim)
        for group, part in self._parts(cached):
            out[:, group.heads] = group.whole(part.transpose(-1, -2))
        return out

    def scores(self, query: Tensor, cached: Tensor) -> Tensor:
        """Products of a few queries with the keys that cached numbers stand for: `[rows, query heads, queries, keys]`.

        Parameters
        ----------
        query : Tensor [rows, query heads, queries, head_dim]
        cached : Tensor [rows, numbers, keys, 1]
        """
        count, query_heads, queries, head_dim = query.shape
        joint = query.reshape(count, self.heads, query_heads // self.heads * queries, head_dim)
        out: Tensor | None = None
        for group, part in self._parts(cached):
            asking = group.asking(joint.index_select(1, group.heads))
            for row in range(count):  # of a row, heads lie evenly behind each other; those of several rows do not
                products = with_values(asking[row], part[row])
                if out is None:
                    out = products.new_zeros(count, *joint.shape[1:3], cached.shape[2])
                out[row].index_copy_(0, group.heads, products)  # heads whole, not element by element
        if out is None:  # every head has rank 0
            out = query.new_zeros(count, *joint.shape[1:3], cached.shape[2])
        return out.view(count, query_heads, queries, cached.shape[2])

    def outputs(self, probabilities: Tensor, cached: Tensor) -> Tensor:
        """Values weighted by the probabilities of a few queries: `[rows, query heads, queries, head_dim]`.

        Parameters
        ----------
        probabilities : Tensor [rows, query heads, queries, keys]
        cached : Tensor [rows, numbers, keys, 1]
        """
        count, query_heads, queries, keys = probabilities.shape
        joint = probabilities.view(count, self.heads, query_heads // self.heads * queries, keys)
        out = cached.new_zeros(*joint.shape[:3], self.head_dim)
        for group, part in self._parts(cached):
            for row in range(count):
                weighted = with_keys(joint[row].index_select(0, group.heads), part[row]).to(cached.dtype)
                out[row].index_copy_(0, group.heads, group.whole(weighted))
        return out.view(count, query_heads, queries, self.head_dim)

    def _parts(self, cached: Tensor) -> list[tuple[SameRank, Tensor]]:
        """Each group with what is cached of it, `[rows, heads of the group, rank, keys]`."""
        split = cached[..., 0].split([group.numbers for group in self.groups], dim=1) if self.groups else ()
        pairs = zip(self.groups, split, strict=True)
        return [(group, part.unflatten(1, (len(group.heads), group.rank))) for group, part in pairs]


class LayerRanks(NamedTuple):
    """How a layer's keys and values are cached."""

    keys: LowRank
    values: LowRank


def low_rank_attention(ranks: LayerRanks, source: Source, view: View, store: RowLayer | None) -> Tensor:
    """Attention of one layer whose keys and values are cached in fewer numbers, but for each row's first key.

    Parameters
    ----------
    source : Source
        Queries, keys and values of the pass, `[rows, heads, length, head_dim]`.
    view : View
    store : RowLayer or None
        The layer's cache.

    Returns
    -------
    Tensor [rows, heads, length, head_dim]
    """
    keys, values = ranks
    query, new_key, rows = source.query(), source.key(), view.rows
    first = new_key[:, :, :1] if rows.past is None else _first_key(store, new_key, rows)
    if store is not None:
        store.state[FIRST_KEY] = first
    new_value = values.project(source.value())
    if store is None or rows.length > FEW_QUERIES:
        key, value = stored(store, keys.project(new_key), new_value, rows)
        whole = torch.cat((first, keys.restore(key[:, :, 1:])), dim=2)
        return full_attention(query, whole, values.restore(value), view)
    store.append(keys.project(new_key), new_value, rows)
    return read_low_rank(ranks, query, first, store.with_room(), view)


def read_low_rank(ranks: LayerRanks, query: Tensor, first: Tensor, cached: tuple[Tensor, Tensor], view: View) -> Tensor:
    """Output of a few queries, whose keys and values are read where they lie in the cache, and never restored.

    Parameters
    ----------
    query : Tensor [rows, heads, queries, head_dim]
    first : Tensor [rows, kv_heads, 1, head_dim]
        Each row's first key.
    cached : tuple of Tensor [rows, numbers, room, 1]
        Of keys, and of values, with whatever free room the cache has behind those in use.

    Returns
    -------
    Tensor [rows, heads, queries, head_dim]
    """
    key, value = cached
    if not reads_whole(key, value):
        key, value = (each[:, :, : view.rows.key_columns(query.shape[2])] for each in cached)
    query = query * view.scaling
    scores = ranks.keys.scores(query, key)
    joint = query.reshape(len(query), ranks.keys.heads, -1, query.shape[3])
    scores[..., 0] = torch.matmul(joint, first.transpose(-1, -2)).view(query.shape[:3])
    return ranks.values.outputs(softmax_of_seen(scores, view, 0, value.dtype), value)


def _first_key(store: RowLayer | None, new: Tensor, rows: Rows) -> Tensor:
    """Each row's first key, `[rows, kv_heads, 1, head_dim]`: remembered, or of this pass where the row begins in it."""
    assert store is not None
    assert rows.past is not None
    if store.reserved:  # every row has begun
        return store.state[FIRST_KEY]
    begins = (rows.past == 0)[:, None, None, None]
    return torch.where(begins, new[:, :, :1], store.state[FIRST_KEY])
