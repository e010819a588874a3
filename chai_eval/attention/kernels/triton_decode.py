"""Few queries against many keys on a GPU; these are read where they lie, see `triton_attention`."""

from __future__ import annotations

import triton
from torch import Tensor

from chai_eval.attention.kernels.triton_arguments import Columns, Heads, Tuning
from chai_eval.attention.kernels.triton_launch import launch, multiprocessors
from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.view import View

# Members of a cluster that one program of `fused` serves at most: their outputs are held in registers.
MOST_MEMBERS = 8
# Programs that a multiprocessor is given, so that some wait for memory while others compute.
PROGRAMS_EACH = 4
MOST_SPLITS = 64
BYTES_AT_ONCE = 32 << 10
# Queries from which on a prompt's kernel suits better.
FEW_QUERIES = 16


def attend(query: Tensor, key: Tensor, value: Tensor, shared: SharedHeads, view: View, first: int) -> Tensor:
    """Output of every head for a few queries; of the representatives alone, where members share their values too.

    Parameters, results and their shapes are those of `decode.attend`.
    """
    heads = Heads.of(shared)
    several = heads.cluster is not None and heads.cluster.shape[1] >= 2 * query.shape[1]
    return (fused if several else indirect)(query, key, value, heads, Columns.of(view, first))


def indirect(
    query: Tensor, key: Tensor, value: Tensor, heads: Heads, columns: Columns, tuning: Tuning | None = None
) -> Tensor:
    """Output of every head, `[rows, heads, queries, d_v]`, each looking its representative's queries and keys up.

    Keys that several heads read come from the second-level cache. Parameters are those of `triton_launch.launch`;
    `tuning` is chosen from the shapes unless given.
    """
    programs = query.shape[0] * (query.shape[1] if heads.cluster is None else heads.cluster.shape[1])
    return launch(query, key, value, heads, columns, tuning or tuned(query, value, programs, 1))


def fused(
    query: Tensor, key: Tensor, value: Tensor, heads: Heads, columns: Columns, tuning: Tuning | None = None
) -> Tensor:
    """The same with a program for each cluster, whose keys are read once for up to `MOST_MEMBERS` of its heads.

    `heads.cluster` must be given.
    """
    assert heads.cluster is not None
    rows, clusters, count = query.shape[0], query.shape[1], heads.cluster.shape[1]
    # Clusters are uneven: twice the mean leaves few of them to be read twice.
    width = triton.next_power_of_2(value.shape[3])
    fit = BYTES_AT_ONCE // (_fewest_keys(query) * width * value.element_size())
    most = min(MOST_MEMBERS if query.shape[2] == 1 else MOST_MEMBERS // 2, max(fit, 1))
    members = min(triton.next_power_of_2(triton.cdiv(2 * count, clusters)), most)
    programs = rows * max(clusters, triton.cdiv(count, members))
    return launch(query, key, value, heads, columns, tuning or tuned(query, value, programs, members))


def tuned(query: Tensor, value: Tensor, programs: int, members: int) -> Tuning:
    """What suits a GPU, from shapes alone: `programs` of so many `members`, times splits that fill it.

    Every program has its share of a row's own keys, so that a row far shorter than the room of its cache is split too.
    """
    wide = members * triton.next_power_of_2(value.shape[3])
    matrices = query.shape[2] > 1
    # Values that are loaded at once take up to 32 KiB, twice or three times, of what a multiprocessor has.
    keys = max(min(BYTES_AT_ONCE // (wide * value.element_size()), 32), _fewest_keys(query))
    stages = 2 if keys * wide * value.element_size() > BYTES_AT_ONCE // 2 else 3
    wanted = triton.cdiv(PROGRAMS_EACH * multiprocessors(query.device), programs)
    splits = max(min(wanted, triton.cdiv(value.shape[2], keys), MOST_SPLITS), 1)
    queries = max(triton.next_power_of_2(query.shape[2]), 16) if matrices else 1
    return Tuning(members, queries, keys, splits, matrices, warps=8 if wide > 256 else 4, stages=stages)


def _fewest_keys(query: Tensor) -> int:
    """Keys that a program takes at a time at least: 16 for matrix units, which several queries go through."""
    return 16 if query.shape[2] > 1 else 8
