"""What the GPU kernels are given: tuples of pointers, strides and numbers; see `triton_attention`."""

from __future__ import annotations

from typing import Any, NamedTuple


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
