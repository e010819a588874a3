"""Attention over rows: every head on its own, or one representative's probabilities shared by its cluster."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention.kernels import decode, prefill
from chai_eval.attention.masks import Window
from chai_eval.attention.membership import Membership
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.rows import Rows

# Up to so many queries at a time keys and values are read where they lie; beyond, laying them side by side pays.
FEW_QUERIES = 16


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float, window: Window | None = None
) -> Tensor:
    """Multi-head attention of every row, each head with its own scores.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, keys, head_dim]
        `keys` is `length`, or more where the pass goes on from a cache.

    Returns
    -------
    Tensor [rows, heads, length, head_dim]
    """
    heads, length = query.shape[1], query.shape[2]
    mask = rows.visible(0, length, window)
    if length <= FEW_QUERIES and rows.past is not None and key.shape[1] < heads:
        # Heads that share keys become queries of one head: keys and values are read where they lie, not copied.
        group = heads // key.shape[1]
        joint = query.reshape(query.shape[0], key.shape[1], group * length, query.shape[3])
        mask = None if mask is None else mask.repeat(1, 1, group, 1)
        out = scaled_dot_product_attention(joint, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(query.shape)
    return scaled_dot_product_attention(
        query,
        repeat_heads(key, heads),
        repeat_heads(value, heads),
        attn_mask=mask,
        is_causal=mask is None and rows.past is None,
        scale=scaling,
    )


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    membership: Membership,
    rows: Rows,
    scaling: float,
    *,
    first: int = 0,
    window: Window | None = None,
    share_value: bool = False,
) -> Tensor:
    """Attention in which each head uses its representative's probabilities with its own values.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, keys, head_dim]
        `keys` is `length`, or more where the pass goes on from a cache.
    membership : Membership
        Of every row.
    first : int
        First column whose queries are wanted; earlier columns are keys only.
    share_value : bool
        Members take their representative's values too, so its whole output.

    Returns
    -------
    Tensor [rows, heads, length - first, head_dim]
    """
    row = torch.arange(query.shape[0], device=query.device)[:, None]
    representative = membership.representative
    key_head = representative // (query.shape[1] // key.shape[1])
    if share_value:
        value = value[row, key_head]
    return shared_attention(
        query[row, representative, first:],
        key[row, key_head],
        value,
        membership,
        rows,
        scaling,
        first=first,
        window=window,
        share_value=share_value,
    )


def shared_attention(
    kept_query: Tensor,
    kept_key: Tensor,
    value: Tensor,
    membership: Membership,
    rows: Rows,
    scaling: float,
    *,
    slot: Tensor | None = None,
    first: int = 0,
    window: Window | None = None,
    share_value: bool = False,
) -> Tensor:
    """The same from the representatives' queries and keys, all that is kept of them.

    The probabilities of a cluster are computed once and shared; nothing of size heads × queries × keys is written for
    more than a few queries.

    Parameters
    ----------
    kept_query : Tensor [rows, clusters, queries, head_dim]
        From column `first` on.
    kept_key : Tensor [rows, kept, keys, head_dim]
        There may be free room behind the keys that count; so in `value`.
    slot : Tensor [rows, clusters], int64, or None
        Which of the kept key heads each representative reads (under grouped-query attention several may read the
        same); None where they correspond one to one.
    value : Tensor [rows, kv_heads, keys, head_dim]
        With `share_value` those that representatives read, `[rows, kept, keys, head_dim]`.

    Returns
    -------
    Tensor [rows, heads, queries, head_dim]
    """
    count, queries = kept_query.shape[0], kept_query.shape[2]
    if share_value:
        alone = Membership.every_head(count, membership.clusters, value.device)
        if slot is not None and queries <= FEW_QUERIES:
            out = decode.attend(
                kept_query, kept_key, slot, value, alone, rows, scaling, first, window, share_value=True
            )
        else:
            own = value if slot is None else value[torch.arange(count, device=value.device)[:, None], slot]
            out = shared_attention(
                kept_query, kept_key, own, alone, rows, scaling, slot=slot, first=first, window=window
            )
        return out.gather(1, membership.cluster[:, :, None, None].expand(-1, -1, queries, value.shape[-1]))
    if queries <= FEW_QUERIES:
        return decode.attend(kept_query, kept_key, slot, value, membership, rows, scaling, first, window)
    if slot is not None:
        kept_key = kept_key[torch.arange(count, device=value.device)[:, None], slot]
    return prefill.attend(kept_query, kept_key, value, membership, rows, scaling, first, window)
