"""Launch of the GPU kernels from plain tensors: what they are given, and how much a program takes at a time.

Nothing here looks at what a tensor on the device holds: a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from chai_eval.attention.kernels.triton_arguments import Block, Joined, Lookup, Output, Seen, Strided
from chai_eval.attention.kernels.triton_attention import attention, join
from chai_eval.attention.masks import Chunk, Window, width


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


def launch(query: Tensor, key: Tensor, value: Tensor, heads: Heads, columns: Columns, tuning: Tuning) -> Tensor:
    """Output of every head: `[rows, heads, queries, d_v]`, in the precision of values.

    Parameters
    ----------
    query : Tensor [rows, clusters, queries, d_k]
    key : Tensor [rows, key heads, room, d_k]
        Free room may lie behind the columns in use. With `heads.pages`: `[pages, key heads, columns of a page, d_k]`.
    value : Tensor [rows, value heads, room, d_v]
        Or in pages.
    heads, columns, tuning
        `tuning.members` above 1 asks for `heads.cluster`.
    """
    rows, clusters, queries, _ = query.shape
    count = clusters if heads.cluster is None else heads.cluster.shape[1]
    out = value.new_empty(rows, count, queries, value.shape[3])
    final, split = _output(out[:, :, None]), tuning.splits > 1
    parts = final
    if split:
        shape = (rows, count, tuning.splits, queries)
        sums = torch.empty(shape, dtype=torch.float32, device=query.device)
        parts = _output(torch.empty(*shape, value.shape[3], dtype=torch.float32, device=query.device), sums)
    block = _block(query, key, value, count, columns, tuning)
    programs = count if tuning.members == 1 else clusters * block.pieces.value
    grid = (programs, triton.cdiv(queries, tuning.queries) * tuning.splits, rows)
    states = tuple(Strided(each, *each.stride()) for each in (query, key, value))
    attention[grid](
        states, _lookup(heads, count, value), _seen(columns, queries), parts, block,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if split:
        padded = (triton.next_power_of_2(tuning.splits), triton.next_power_of_2(value.shape[3]))
        sizes = Joined(count, queries, tuning.splits, value.shape[3], *map(tl.constexpr, padded))
        join[(count, queries, rows)](parts, final, sizes)
    return out


def _block(query: Tensor, key: Tensor, value: Tensor, count: int, columns: Columns, tuning: Tuning) -> Block:
    clusters, key_width, value_width = query.shape[1], query.shape[3], value.shape[3]
    narrowest = 16 if tuning.matrices else 1
    return Block(*map(tl.constexpr, (
        tuning.queries,
        tuning.keys,
        key_width,
        value_width,
        max(triton.next_power_of_2(key_width), narrowest),
        max(triton.next_power_of_2(value_width), narrowest),
        count,
        triton.next_power_of_2(count),
        clusters,
        tuning.members,
        # Of a cluster with every head that is not another's only one.
        math.ceil((count - clusters + 1) / tuning.members),
        tuning.splits,
        key.shape[2],
        isinstance(columns.window, Chunk),
        tuning.matrices,
        value.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
    )))  # fmt: skip


def _lookup(heads: Heads, count: int, value: Tensor) -> Lookup:
    return Lookup(
        heads.cluster,
        _row_stride(heads.cluster),
        heads.slot,
        _row_stride(heads.slot),
        heads.value,
        _row_stride(heads.value),
        max(count // value.shape[1], 1),
        heads.pages,
        _row_stride(heads.pages),
    )


def _row_stride(table: Tensor | None) -> int:
    return 0 if table is None or len(table) == 1 else table.stride(0)


def _seen(columns: Columns, queries: int) -> Seen:
    window = None if columns.window is None else width(columns.window)
    return Seen(columns.past, columns.first, queries, window, columns.scale * math.log2(math.e), columns.first_score)


def _output(states: Tensor, sums: Tensor | None = None) -> Output:
    row, head, split, query, _ = states.stride()
    return Output(states, row, head, split, query, sums)


def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 1 for a processor, on which only the interpreter runs the kernels."""
    return _properties(device)["multiprocessor_count"] if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on a multiprocessor; 0 on a processor."""
    return _properties(device)["max_shared_mem"] if device.type == "cuda" else 0


@cache
def _properties(device: torch.device) -> dict[str, int]:
    index = torch.cuda.current_device() if device.index is None else device.index
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties
