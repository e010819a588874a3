"""What the GPU kernels of `triton_attention` are given: by their callers, and as tuples of pointers and numbers.

Nothing here needs triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from chai_eval.attention.masks import Window
from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.view import View


@dataclass(frozen=True)
class Heads:
    """Which heads meet, by tables of int64 or int32; `rows` is 1 or the number of rows.

    Attributes
    ----------
    cluster : Tensor [rows, heads], or None
        Which query each head asks with; None where each has its own.
    slot : Tensor [rows, clusters], or None
        Which key head each query meets; None where they correspond one to one.
    value : Tensor [rows, heads], or None
        Which value head each head reads; None where those of `heads // value heads` heads in a row read the same.
    pages : Tensor [rows, n], or None
        Where keys and values are paged: the pages in which each row's columns lie.
    """

    cluster: Tensor | None = None
    slot: Tensor | None = None
    value: Tensor | None = None
    pages: Tensor | None = None

    @classmethod
    def of(cls, shared: SharedHeads) -> Heads:
        """Those of a layer; of the representatives alone, where members share their values too."""
        if shared.share_value:
            return cls(slot=shared.slot, value=shared.slot)
        return cls(shared.membership.cluster, shared.slot)


@dataclass(frozen=True)
class Columns:
    """What queries see: query i of row r stands in column `past[r] + first + i`, and sees all up to its own.

    Attributes
    ----------
    scale : float
        Factor of the products of queries and keys.
    past : Tensor [rows], int64 or int32, or None
        None for zeros.
    first : int
    window : int, Chunk or None
        Width of the sliding window, or the chunks.
    first_score : Tensor [rows, clusters, queries], or None
        Products, without the factor, that stand in for those with the keys in column 0.
    """

    scale: float
    past: Tensor | None = None
    first: int = 0
    window: Window | None = None
    first_score: Tensor | None = None

    @classmethod
    def of(cls, view: View, first: int) -> Columns:
        """What queries in columns `first` and after see."""
        return cls(view.scaling, view.rows.past, first, view.binding)


@dataclass(frozen=True)
class Tuning:
    """How much a program takes at a time, powers of 2 but for `splits`; none of it changes what is computed.

    Attributes
    ----------
    members : int
        Heads whose values meet the probabilities of one program. With 1, every head looks its representative up.
    queries, keys : int
    splits : int
        Programs that share the keys of a block of queries.
    matrices : bool
        Products by matrix units, for which 16 queries and keys are the least.
    warps, stages : int
    """

    members: int = 1
    queries: int = 16
    keys: int = 32
    splits: int = 1
    matrices: bool = True
    warps: int = 4
    stages: int = 2


class Strided(NamedTuple):
    """A tensor `[rows, heads, columns, width]`: where it begins, and its strides; rows are pages where it is paged."""

    start: Any
    row: Any
    head: Any
    column: Any
    width: Any


class Lookup(NamedTuple):
    """Which heads meet, by tables of one row or of every row; None for a table that changes nothing.

    `cluster`, `[rows, heads]`, says which query a head asks with; `slot`, `[rows, clusters]`, which key head that query
    meets; `value`, `[rows, heads]`, which value head a head reads, otherwise `head // group`. `pages`, `[rows, n]`, are
    the pages that a row's columns lie in.
    """

    cluster: Any
    cluster_row: Any
    slot: Any
    slot_row: Any
    value: Any
    value_row: Any
    group: Any
    pages: Any
    pages_row: Any


class Seen(NamedTuple):
    """What queries see: query i of row r stands in column `past[r] + first + i`, and sees what is not behind it.

    With a `window` so many columns at most, its own among them; `first_score`, `[rows, clusters, queries]`, are
    products that stand in for those with column 0. `scale` is the factor of products, for powers of 2.
    """

    past: Any
    first: Any
    queries: Any
    window: Any
    scale: Any
    first_score: Any


class Output(NamedTuple):
    """Where outputs `[rows, heads, splits, queries, d_v]` go, and logarithms of sums, without the last dimension."""

    start: Any
    row: Any
    head: Any
    split: Any
    query: Any
    logarithm: Any


class Block(NamedTuple):
    """What a program takes at a time; constants to the compiler, `d_k` and `d_v` padded to powers of 2."""

    queries: Any
    keys: Any
    key_width: Any
    value_width: Any
    padded_key: Any
    padded_value: Any
    heads: Any
    padded_heads: Any
    clusters: Any
    members: Any
    pieces: Any
    splits: Any
    stages: Any
    page: Any
    chunked: Any
    matrices: Any
    widened: Any


class Joined(NamedTuple):
    """Sizes of what is joined; the padded ones, powers of 2, are constants to the compiler."""

    heads: Any
    queries: Any
    splits: Any
    width: Any
    padded_splits: Any
    padded_width: Any
