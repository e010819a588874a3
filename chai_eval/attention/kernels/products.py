"""Products of a few queries with keys, and of their probabilities with values, in the precision the processor has.

PyTorch multiplies bfloat16 and float16 on a CPU that has no instructions for it by plain loops, a hundred times slower
than float32. There numbers are made float32 first, piece by piece, so that what is read twice stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

# Numbers of a piece: 8 MiB in float32. A smaller one is read faster, but calls for more operations.
PIECE = 1 << 21
# Heads of a piece, which the cores share.
HEADS = 8


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device multiplies matrices of a precision as they are."""
    return device.type != "cpu" or cpu_multiplies(dtype)


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this precision by instructions of this machine's processor."""
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return asked is None or (hasattr(torch.ops.mkldnn, asked) and bool(getattr(torch.ops.mkldnn, asked)()))


def with_keys(query: Tensor, key: Tensor) -> Tensor:
    """Products of queries and keys, in float32 where the device does not multiply their precision.

    Parameters
    ----------
    query : Tensor [n, queries, head_dim]
    key : Tensor [n, keys, head_dim]

    Returns
    -------
    Tensor [n, queries, keys]
    """
    if multiplies(key.dtype, key.device):
        return _transposed_product(query, key)
    out = torch.empty(*query.shape[:2], key.shape[1], dtype=torch.float32, device=key.device)
    query = query.float()
    for some, part, piece in _pieces(key):
        out[some, :, part] = _transposed_product(query[some], piece)
    return out


def with_values(probabilities: Tensor, value: Tensor) -> Tensor:
    """Values weighted by probabilities, in float32 where the device does not multiply their precision.

    Parameters
    ----------
    probabilities : Tensor [n, queries, keys]
    value : Tensor [n, keys, head_dim]

    Returns
    -------
    Tensor [n, queries, head_dim]
    """
    if multiplies(value.dtype, value.device):
        return torch.bmm(probabilities, value)
    out = torch.zeros(*probabilities.shape[:2], value.shape[2], dtype=torch.float32, device=value.device)
    for some, part, piece in _pieces(value):
        out[some] += torch.bmm(probabilities[some, :, part], piece)
    return out


def _transposed_product(query: Tensor, key: Tensor) -> Tensor:
    if query.shape[1] > 1:
        return torch.bmm(query, key.transpose(-1, -2))
    # Of a matrix and a column: MKL reads it half as fast again as a row and a transposed matrix.
    return torch.bmm(key, query.transpose(-1, -2)).transpose(-1, -2)


def _pieces(states: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """`[n, keys, head_dim]` as float32 in pieces `[some of n, part of keys, head_dim]`, each in the last's place."""
    count, keys, head_dim = states.shape
    if torch.is_grad_enabled():  # which keeps what was multiplied
        yield slice(None), slice(None), states.float()
        return
    several = min(count, HEADS)
    at_once = min(keys, max(PIECE // (several * head_dim), 1))
    room = torch.empty(several * at_once * head_dim, dtype=torch.float32, device=states.device)
    for start in range(0, count, several):
        some = slice(start, min(start + several, count))
        for begin in range(0, keys, at_once):
            part = slice(begin, min(begin + at_once, keys))
            taken = states[some, part]
            yield some, part, room[: taken.numel()].view(taken.shape).copy_(taken)
