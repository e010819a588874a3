"""Launch of the GPU kernels from plain tensors: what they are given, and how much a program takes at a time.

Nothing here looks at what a tensor on the device holds: a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from chai_eval.attention.kernels.triton_arguments import (
    Block,
    Columns,
    Heads,
    Joined,
    Lookup,
    Output,
    Seen,
    Strided,
    Tuning,
)
from chai_eval.attention.kernels.triton_attention import attention, join
from chai_eval.attention.masks import Chunk, width


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
        tuning.stages,
        key.shape[2],
        isinstance(columns.window, Chunk),
        tuning.matrices,
        value.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
    )))  # fmt: skip


def _lookup(heads: Heads, count: int, value: Tensor) -> Lookup:
    tables = (heads.cluster, heads.slot, heads.value, heads.pages)
    cluster, slot, of_value, pages = (
        table if table is None or table.stride(1) == 1 else table.contiguous() for table in tables
    )
    return Lookup(
        cluster,
        _row_stride(cluster),
        slot,
        _row_stride(slot),
        of_value,
        _row_stride(of_value),
        max(count // value.shape[1], 1),
        pages,
        _row_stride(pages),
    )


def _row_stride(table: Tensor | None) -> int:
    return 0 if table is None or len(table) == 1 else table.stride(0)


def _seen(columns: Columns, queries: int) -> Seen:
    window = None if columns.window is None else width(columns.window)
    first_score = None if columns.first_score is None else columns.first_score.contiguous()
    return Seen(columns.past, columns.first, queries, window, columns.scale * math.log2(math.e), first_score)


def _output(states: Tensor, sums: Tensor | None = None) -> Output:
    row, head, split, query, _ = states.stride()
    return Output(states, row, head, split, query, sums)


def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 1 for a processor, on which only the interpreter runs the kernels."""
    return _properties(device)["multiprocessor_count"] if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on a multiprocessor; on a processor those of a small GPU."""
    return _properties(device)["max_shared_mem"] if device.type == "cuda" else 99 << 10


@cache
def _properties(device: torch.device) -> dict[str, int]:
    index = torch.cuda.current_device() if device.index is None else device.index
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties
