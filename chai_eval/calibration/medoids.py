"""Which heads should serve the others: k-medoids on the directional cost of serving one head by another."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor

from chai_eval.errors import RunError


def representatives(cost: Tensor, clusters: int, kv_heads: int | None = None, keep: int | None = None) -> Tensor:
    """The representatives with the smallest total cost, exactly: `[heads]`, int64, the head that serves each head.

    One that serves others serves itself. The p-median problem, solved by HiGHS's branch and bound (through SciPy):
    milliseconds for 32 heads, as its linear relaxation is nearly always whole. RunError where the solver gives up.

    Parameters
    ----------
    cost : Tensor [heads, heads]
        Entry (i, r): what it costs that head r serves head i; zero on the diagonal, not below zero, directional.
    clusters : int
        How many heads serve, at most.
    kv_heads, keep : int or None
        Where query heads share K/V heads: how many of those there are, and how many may be kept.
    """
    heads = len(cost)
    if clusters >= heads and (keep is None or keep >= (kv_heads or heads)):
        return torch.arange(heads)
    groups = kv_heads or heads
    scale = float(cost.max()) or 1.0  # tolerances are absolute
    pairs = heads * heads  # x[i, r] = 1: head r serves head i; then one variable for each K/V head that is kept
    serves = np.arange(pairs).reshape(heads, heads)
    served_by_other = [(i, r) for i in range(heads) for r in range(heads) if i != r]
    only_servers = _rows(
        [[(serves[i, r], 1), (serves[r, r], -1)] for i, r in served_by_other]
        + [[(serves[r, r], 1), (pairs + r * groups // heads, -1)] for r in range(heads)],
        pairs + groups,
    )
    every_head = _rows([[(serves[i, r], 1) for r in range(heads)] for i in range(heads)], pairs + groups)
    how_many = _rows(
        [[(serves[r, r], 1) for r in range(heads)], [(pairs + g, 1) for g in range(groups)]], pairs + groups
    )
    whole = np.zeros(pairs + groups)
    whole[np.diagonal(serves)] = 1
    found = milp(
        np.concatenate((cost.double().numpy().ravel() / scale, np.zeros(groups))),
        integrality=whole,
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(every_head, 1, 1),
            LinearConstraint(only_servers, -np.inf, 0),
            LinearConstraint(how_many, -np.inf, [clusters, groups if keep is None else keep]),
        ],
    )
    if found.x is None:
        raise RunError(f"calibration: no representatives found ({found.message})")
    servers = np.flatnonzero(found.x[np.diagonal(serves)] > 0.5)
    serving = torch.from_numpy(servers)[cost[:, servers].argmin(1)]
    serving[servers] = torch.from_numpy(servers)
    return serving


def kept_by(count: int, heads: int, kv_heads: int) -> int:
    """The fewest K/V heads that so many query heads can share."""
    return math.ceil(count * kv_heads / heads)


def _rows(rows: list[list[tuple[int, int]]], width: int) -> coo_array:
    entries = [(row, column, value) for row, each in enumerate(rows) for column, value in each]
    at, columns, values = zip(*entries, strict=True)
    return coo_array((values, (at, columns)), shape=(len(rows), width))
