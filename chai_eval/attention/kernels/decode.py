"""Few queries against many keys: keys and values are read where they lie in the cache, and never copied.

PyTorch multiplies bfloat16 and float16 on a CPU that has no instructions for it by plain loops, a hundred times slower
than float32. There numbers are made float32 first, piece by piece, so that what is read twice stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.view import View

# Numbers of a piece: 8 MiB in float32. A smaller one is read faster, but calls for more operations.
PIECE = 1 << 21
# Heads of a piece, which the cores share.
HEADS = 8


def attend(query: Tensor, key: Tensor, value: Tensor, shared: SharedHeads, view: View, first: int) -> Tensor:
    """Output of every head for a few queries; of the representatives alone, where members share their values too.

    It is `[rows, heads or clusters, queries, head_dim]`. Probabilities of the representatives are handed to every head:
    next to a head's values they are one number in `head_dim`, so this costs nothing that can be felt, while values laid
    side by side would have to be copied.

    Parameters
    ----------
    query : Tensor [rows, clusters, queries, head_dim]
        Of the representatives, in columns `first` and after.
    key : Tensor [rows, kept, room, head_dim]
        With whatever free room the cache has behind the keys in use.
    value : Tensor [rows, kv_heads or kept, room, head_dim]
    """
    count, queries, membership, slot = query.shape[0], query.shape[2], shared.membership, shared.slot
    keys = view.rows.key_columns(first + queries)
    if not reads_whole(key, value):
        key, value = key[:, :, :keys], value[:, :, :keys]
    room = value.shape[2]
    query = query * view.scaling
    probabilities = softmax_of_seen(_by_slot(with_keys, query, key, slot), view, first, value.dtype)
    if shared.share_value:
        return _by_slot(with_values, probabilities, value, slot).to(value.dtype)
    heads, kv_heads = membership.cluster.shape[1], value.shape[1]
    # Heads are taken whole: a gather by elements would take longer than all else but the products.
    of_head = probabilities.flatten(0, 1).index_select(0, membership.flat)
    # Heads that share a value head are rows of one product.
    joint = of_head.view(count * kv_heads, heads // kv_heads * queries, room)
    out = with_values(joint, value.flatten(0, 1))
    return out.view(count, heads, queries, value.shape[-1]).to(value.dtype)


def softmax_of_seen(scores: Tensor, view: View, first: int, dtype: torch.dtype) -> Tensor:
    """Probabilities of a few queries over the keys that they see, in the precision in which they meet values (`dtype`).

    The scores, `[rows, n, queries, room]`, are those of queries in columns `first` and after, with whatever free room
    there is behind the keys in use. They are overwritten.
    """
    queries, room = scores.shape[2], scores.shape[3]
    keys = view.rows.key_columns(first + queries)
    seen = view.mask(first, first + queries)
    if seen is None and view.rows.past is None:  # plain causality: a short request from its first token on
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
    if seen is not None:
        scores[..., :keys].masked_fill_(~seen, float("-inf"))
    if keys < room:
        scores[..., keys:] = float("-inf")
    return scores.softmax(-1, dtype=torch.float32).to(dtype if multiplies(dtype, scores.device) else torch.float32)


def _by_slot(product: Callable[[Tensor, Tensor], Tensor], asking: Tensor, kept: Tensor, slot: Tensor | None) -> Tensor:
    """Products of each representative with the kept head that is its own (by `slot`): `[rows, clusters, queries, ...]`.

    Every representative meets every kept head, and the right one is taken: what is kept is read once, and not copied.
    Asking is `[rows, clusters, queries, ...]`, what is kept `[rows, kept, keys, head_dim]`, `slot` `[rows, clusters]`,
    or None where they correspond one to one.
    """
    if slot is None:
        return product(asking.flatten(0, 1), kept.flatten(0, 1)).view(*asking.shape[:3], -1)
    count, clusters, queries, _ = asking.shape
    heads = kept.shape[1]
    everyone = asking.flatten(1, 2)[:, None].expand(-1, heads, -1, -1)
    every = product(everyone.flatten(0, 1), kept.flatten(0, 1))
    # Of row r the kept head k and cluster c: entry (r * heads + k) * clusters + c.
    first_kept = torch.arange(0, count * heads, heads, device=slot.device)[:, None]
    where = (first_kept + slot) * clusters + torch.arange(clusters, device=slot.device)
    return every.view(-1, queries, every.shape[-1]).index_select(0, where.flatten()).view(*asking.shape[:3], -1)


def reads_whole(key: Tensor, value: Tensor) -> bool:
    """Whether buffers are better read with their free room than through a view of what is in use.

    PyTorch's product of low precision on a CPU copies a view before it reads it. Free room holds zeros.
    """
    low = value.device.type == "cpu" and value.dtype != torch.float32 and multiplies(value.dtype, value.device)
    return low and key.shape[2] == value.shape[2]


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

    From `[n, queries, head_dim]` and `[n, keys, head_dim]` to `[n, queries, keys]`.
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

    From `[n, queries, keys]` and `[n, keys, head_dim]` to `[n, queries, head_dim]`.
    """
    if multiplies(value.dtype, value.device):
        return torch.bmm(probabilities, value)
    out = torch.zeros(*probabilities.shape[:2], value.shape[2], dtype=torch.float32, device=value.device)
    probabilities = probabilities.float()
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
