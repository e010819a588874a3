"""Few queries against many keys: keys and values are read where they lie in the cache, and never copied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chai_eval.attention.kernels.products import multiplies, with_keys, with_values
from chai_eval.attention.masks import Window
from chai_eval.attention.membership import Membership
from chai_eval.attention.rows import Rows


def attend(
    kept_query: Tensor,
    kept_key: Tensor,
    slot: Tensor | None,
    value: Tensor,
    membership: Membership,
    rows: Rows,
    scaling: float,
    first: int,
    window: Window | None,
    *,
    share_value: bool = False,
) -> Tensor:
    """Output of every head for a few queries.

    Probabilities of the representatives are handed to every head: next to a head's values they are one number in
    `head_dim`, so this costs nothing that can be felt, while values laid side by side would have to be copied.

    Parameters
    ----------
    kept_query : Tensor [rows, clusters, queries, head_dim]
    kept_key : Tensor [rows, kept, room, head_dim]
        With whatever free room the cache has behind the keys in use.
    slot : Tensor [rows, clusters], int64, or None
        Which of the kept key heads each representative reads; None where they correspond one to one.
    value : Tensor [rows, kv_heads, room, head_dim]
    share_value : bool
        Only the representatives' own outputs are wanted, with the value heads that `slot` names; the heads of
        `membership` are the representatives.

    Returns
    -------
    Tensor [rows, heads, queries, head_dim]
    """
    count, queries = kept_query.shape[0], kept_query.shape[2]
    kv_heads, heads = value.shape[1], membership.cluster.shape[1]
    keys = rows.key_columns(first + queries)
    if not _reads_whole(kept_key, value):
        kept_key, value = kept_key[:, :, :keys], value[:, :, :keys]
    room = value.shape[2]
    kept_query = kept_query * scaling
    if slot is None:
        scores = with_keys(kept_query.flatten(0, 1), kept_key.flatten(0, 1)).view(count, -1, queries, room)
    else:
        scores = _by_slot(with_keys, kept_query, kept_key, slot)
    seen = rows.visible(first, first + queries, window)
    if seen is None and rows.past is None:  # plain causality: a short request from its first token on
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
    if seen is not None:
        scores[..., :keys].masked_fill_(~seen, float("-inf"))
    if keys < room:
        scores[..., keys:] = float("-inf")
    precision = value.dtype if multiplies(value.dtype, value.device) else torch.float32
    probabilities = scores.softmax(-1, dtype=torch.float32).to(precision)
    if share_value and slot is not None:
        return _by_slot(with_values, probabilities, value, slot).to(value.dtype)
    # Heads are taken whole: a gather by elements would take longer than all else but the products.
    of_head = probabilities.flatten(0, 1).index_select(0, membership.flat)
    # Heads that share a value head are rows of one product.
    joint = of_head.view(count * kv_heads, heads // kv_heads * queries, room)
    out = with_values(joint, value.flatten(0, 1))
    return out.view(count, heads, queries, value.shape[-1]).to(value.dtype)


def _by_slot(product: Callable[[Tensor, Tensor], Tensor], asking: Tensor, kept: Tensor, slot: Tensor) -> Tensor:
    """Products of each representative with the kept head that is its own.

    Every representative meets every kept head, and the right one is taken: what is kept is read once, and not copied.

    Parameters
    ----------
    product : function of Tensor [n, queries, ...] and Tensor [n, keys, head_dim]
    asking : Tensor [rows, clusters, queries, ...]
    kept : Tensor [rows, kept, keys, head_dim]
    slot : Tensor [rows, clusters], int64

    Returns
    -------
    Tensor [rows, clusters, queries, ...]
    """
    count, clusters, queries, _ = asking.shape
    heads = kept.shape[1]
    everyone = asking.flatten(1, 2)[:, None].expand(-1, heads, -1, -1)
    every = product(everyone.flatten(0, 1), kept.flatten(0, 1))
    # Of row r the kept head k and cluster c: entry (r * heads + k) * clusters + c.
    first_kept = torch.arange(0, count * heads, heads, device=slot.device)[:, None]
    where = (first_kept + slot) * clusters + torch.arange(clusters, device=slot.device)
    return every.view(-1, queries, every.shape[-1]).index_select(0, where.flatten()).view(*asking.shape[:3], -1)


def _reads_whole(kept_key: Tensor, value: Tensor) -> bool:
    """Whether buffers are better read with their free room than through a view of what is in use.

    PyTorch's product of low precision on a CPU copies a view before it reads it. Free room holds zeros.
    """
    low = value.device.type == "cpu" and value.dtype != torch.float32 and multiplies(value.dtype, value.device)
    return low and kept_key.shape[2] == value.shape[2]
