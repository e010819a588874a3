"""Many queries on a GPU: a cluster's probabilities meet the values of several members, see `triton_attention`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from chai_eval.attention.kernels.triton_arguments import Columns, Heads, Tuning
from chai_eval.attention.kernels.triton_launch import launch, shared_memory
from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.view import View

# Numbers of outputs that a program holds in registers, `members * d_v` of them for each of its 64 queries.
WIDEST = 512


def attend(query: Tensor, key: Tensor, value: Tensor, shared: SharedHeads, view: View, first: int) -> Tensor:
    """Output of every head for queries in columns `first` and after; of the representatives alone with shared values.

    Parameters, results and their shapes are those of `decode.attend`.
    """
    return prompt(query, key, value, Heads.of(shared), Columns.of(view, first))


def prompt(
    query: Tensor, key: Tensor, value: Tensor, heads: Heads, columns: Columns, tuning: Tuning | None = None
) -> Tensor:
    """Output of every head, `[rows, heads, queries, d_v]`; parameters are those of `triton_launch.launch`."""
    return launch(query, key, value, heads, columns, tuning or tuned(query, value, heads))


def tuned(query: Tensor, value: Tensor, heads: Heads) -> Tuning:
    """What suits a GPU, from shapes and the memory that its multiprocessors have.

    Numbers are those that ptxas holds in registers, or nearly, for sm_80 and sm_90.
    """
    width = triton.next_power_of_2(value.shape[3])
    if value.dtype == torch.float32:  # no matrix units: what is held at once has to be small
        return Tuning(1, queries=32, keys=32, warps=8)
    shared = shared_memory(value.device)
    members = 1
    if heads.cluster is not None:
        mean = triton.cdiv(heads.cluster.shape[1], query.shape[1])
        members = max(min(triton.next_power_of_2(mean), WIDEST // width), 1)
    queries, keys, stages = (128, 64, 3) if members * width <= 128 else (64, 64, 2)
    # Queries stay; keys and values of each stage lie beside them, in numbers of two bytes.
    of_query = triton.next_power_of_2(query.shape[3])
    while keys > 16 and 2 * (queries * of_query + stages * keys * (of_query + members * width)) > shared:
        keys //= 2
    return Tuning(members, queries, keys, warps=8, stages=stages)
