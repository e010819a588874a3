"""Which of many to keep: by importance, the lowest index among ties."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# (1 - s) n is an integer or far from one: s has a few digits. What lies this close above one is rounding.
ROUNDING = 1e-9

# Importances that differ by less than this part of them are a tie. Heads that share their values (GQA) and look at one
# key alone differ in the last bits only, which depend on the batch.
TIE = 1e-6


def kept_count(n: int, sparsity: float) -> int:
    """⌈(1 − s) n⌉, with 0.7 of 10 left out leaving 3 though 1 − 0.7 is not 0.3 in binary."""
    return math.ceil((1 - sparsity) * n - ROUNDING)


def kept_counts(n: Tensor, sparsity: float) -> Tensor:
    """`kept_count` of each of many numbers, int64."""
    return ((1 - sparsity) * n.double() - ROUNDING).ceil().long()


def highest(importance: Tensor, count: int | Tensor) -> Tensor:
    """Mark the highest entries along the last dimension; among ties (see `TIE`) the first.

    Parameters
    ----------
    importance : Tensor [..., n]
        Finite.
    count : int, or Tensor [...] of int64
        How many, from 1 to n.

    Returns
    -------
    Tensor [..., n], bool
    """
    if isinstance(count, int):
        lowest = importance.kthvalue(importance.shape[-1] - count + 1, dim=-1, keepdim=True).values
        wanted: int | Tensor = count
    else:
        wanted = count[..., None]
        lowest = importance.sort(dim=-1, descending=True).values.gather(-1, wanted - 1)
    near = TIE * lowest.abs()
    above = importance > lowest + near
    tied = (importance >= lowest - near) & ~above
    room = wanted - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
