"""Clustered attention of a layer, step by step: what a plan says about queries, keys and values, wherever they lie.

The steps are those of the design (docs/design.md, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from chai_eval.attention.kernels import decode, gpu, prefill
from chai_eval.attention.membership import Membership
from chai_eval.attention.probe import probe_probabilities, repeat_heads
from chai_eval.attention.regroup import PROBE_KEY, REGROUPED, Guard
from chai_eval.attention.row_layer import PROBE_QUERY, RowLayer
from chai_eval.attention.rows import Rows
from chai_eval.attention.sharing import FixedPlan, Plan, ProbePlan, SharedHeads, heads_of
from chai_eval.attention.sources import Computed, Source
from chai_eval.attention.unfolded import Unfolded
from chai_eval.attention.view import View

# Up to so many queries at a time keys and values are read where they lie; beyond, laying them side by side pays.
FEW_QUERIES = 16


def attend(plan: Plan | None, source: Source, view: View, store: RowLayer | None) -> Tensor:
    """Attention of one layer in one forward pass: `[rows, heads, length, head_dim]`.

    Parameters
    ----------
    plan : Plan or None
        How heads share scores; None where every head has its own.
    source : Source
        Queries, keys and values of the pass.
    store : RowLayer or None
        The layer's cache, which keeps what the pass adds.
    """
    if plan is None:
        return full_attention(source.query(), *stored(store, source.key(), source.value(), view.rows), view)
    plan.check_window(view.window)
    if plan.guard is not None and view.rows.branch is not None and view.rows.length > plan.guard.every:
        alone = Unfolded.of(view.rows)  # branches of a context may come to other clusters
        states = Computed(*map(alone.unfold, (source.query(), source.key(), source.value())))
        return alone.fold(attend(plan, states, View(alone.rows, view.scaling), None), view.rows.length)
    shared = None if store is None else store.shared
    if shared is None and isinstance(plan, FixedPlan):
        membership = plan.membership.changed(lambda each: each.to(source.device).expand(view.rows.count, -1))
        shared = _share(plan, membership, source)
    if shared is not None:
        return _after_probe(plan, shared, source, view, store)
    assert isinstance(plan, ProbePlan)
    if store is None and view.rows.length <= plan.probe_tokens:  # every head has its own scores all along
        return full_attention(source.query(), source.key(), source.value(), view.whole)
    if view.rows.past is None and (store is None or view.rows.shortest >= plan.probe_tokens < view.rows.length):
        return _with_probe(plan, source, view, store)
    assert store is not None
    return _within_probe(plan, source, view, store)


def _with_probe(plan: ProbePlan, source: Source, view: View, store: RowLayer | None) -> Tensor:
    """A pass from each request's first token to beyond its probe."""
    early, late = slice(0, plan.probe_tokens), slice(plan.probe_tokens, None)
    # Steps 1 to 4: what heads attend to over the probe tokens says which of them share a representative.
    probe_query, probe_key = source.query(columns=early), source.key(columns=early)
    shared = _share(plan, plan.cluster(probe_query, probe_key, view.scaling), source)
    # Step 6: representatives' keys are all that is cached, those of the probe tokens too.
    key, value = source.key(shared.key_heads), source.value(shared.value_heads)
    probe_value = source.value(columns=early) if shared.share_value else value[:, :, early]
    key, value = stored(store, key, value, view.rows)
    # Step 5: the probe tokens by every head's own scores, all later ones by their representatives'.
    exact = exact_attention(probe_query, probe_key, probe_value, view.scaling)
    query, state = source.query(shared.membership.representative, late), {} if store is None else store.state
    if plan.guard is not None:
        state[PROBE_KEY] = probe_key.clone()
    out, shared = guarded_attention(plan.guard, (query, key, value), shared, source, view, state)
    if store is not None:
        store.shared = shared
    return torch.cat((exact, out), dim=2)


def _after_probe(plan: Plan, shared: SharedHeads, source: Source, view: View, store: RowLayer | None) -> Tensor:
    """A pass under a membership that is known: going on from a cache, or fixed beforehand (steps 5 and 6)."""
    query = source.query(shared.membership.representative)
    key, value = source.key(shared.key_heads), source.value(shared.value_heads)
    if store is None:
        return shared_attention(query, key, value, shared, view)
    store.append(key, value, view.rows)
    states = (query, *store.with_room())
    out, store.shared = guarded_attention(plan.guard, states, shared, source, view, store.state)
    return out


def _within_probe(plan: ProbePlan, source: Source, view: View, store: RowLayer) -> Tensor:
    """A pass at whose end, or beginning, some request's probe was not complete: the cache keeps every head's keys.

    Requests of a batch come to the end of their probe in different passes; each is clustered from there on.
    """
    rows, probe_tokens, query = view.rows, plan.probe_tokens, source.query()
    key, value = store.append(source.key(), source.value(), rows)
    probe_query = _probe_query(store.state.get(PROBE_QUERY), query, rows, probe_tokens)
    store.state[PROBE_QUERY] = probe_query
    out = full_attention(query, key, value, view.whole)
    if key.shape[2] < probe_tokens:
        return out
    probe_key, state = key[:, :, :probe_tokens], store.state
    shared = _share(plan, plan.cluster(probe_query, probe_key, view.scaling), source)
    if plan.guard is not None:
        state[PROBE_KEY], shared = probe_key.clone(), plan.guard.earlier(shared, state)
    column = torch.arange(rows.length, device=query.device)
    if rows.past is not None:
        column = column + rows.past[:, None]
    if key.shape[2] > probe_tokens:
        query, key = heads_of(query, shared.membership.representative), heads_of(key, shared.key_heads)
        states = (query, key, heads_of(value, shared.value_heads))
        late, shared = guarded_attention(plan.guard, states, shared, source, view, state)
        if plan.guard is not None:
            plan.guard.keep(shared, state, rows)
        out = torch.where((column >= probe_tokens).expand(rows.count, -1)[:, None, :, None], late, out)
    if rows.shortest >= probe_tokens:
        store.share(shared)
        del state[PROBE_QUERY]
        state.pop(REGROUPED, None)
    return out


def guarded_attention(
    guard: Guard | None,
    states: tuple[Tensor, Tensor, Tensor],
    shared: SharedHeads,
    source: Source,
    view: View,
    state: dict[str, Tensor],
) -> tuple[Tensor, SharedHeads]:
    """Shared attention of the last columns of a pass, in stretches between which a guard may move heads.

    Parameters
    ----------
    states : three of Tensor
        Queries, of the last columns, keys and values as in `shared_attention`.
    source : Source
        Of the whole pass, for the heads that the guard looks at.
    state : dict of str to Tensor
        What it remembers.

    Returns
    -------
    Tensor [rows, heads, queries, head_dim]
    SharedHeads
        As they are from the next pass on.
    """
    (query, key, value), rows = states, view.rows
    first, parts = rows.length - query.shape[2], []
    if guard is None:
        return shared_attention(query, key, value, shared, view, first), shared
    for start, stop in guard.stretches(rows, first):
        part = query[:, :, start - first : stop - first]
        parts.append(shared_attention(part, key, value, shared, view, start))
        guard.note(state, source, rows, start, stop)
        shared = guard.after(shared, state, view, stop)
    return torch.cat(parts, dim=2), shared


def _probe_query(before: Tensor | None, query: Tensor, rows: Rows, probe_tokens: int) -> Tensor:
    """Queries of the probe tokens so far, `[rows, heads, probe, head_dim]`: those of earlier passes and of this one."""
    if before is None:
        return pad(query[:, :, :probe_tokens], (0, 0, 0, max(probe_tokens - rows.length, 0)))
    assert rows.past is not None
    offset = torch.arange(rows.length, device=query.device)
    column = rows.past[:, None] + offset  # [rows, length]
    row, new = torch.nonzero((column < probe_tokens) & (offset < rows.lengths[:, None]), as_tuple=True)
    filled = before.clone()
    filled[row, :, column[row, new]] = query[row, :, new]
    return filled


def _share(plan: Plan, membership: Membership, source: Source) -> SharedHeads:
    return SharedHeads.of(membership, source.kv_heads, share_value=plan.share_value)


def stored(store: RowLayer | None, key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole rows, `[rows, heads, keys, head_dim]`: those of the pass behind the cache's."""
    return (key, value) if store is None else store.append(key, value, rows)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of the probe tokens, every head by its own scores in float32 (step 1).

    Queries are `[rows, heads, probe, head_dim]`, and so is what comes out; keys and values have `kv_heads`.
    """
    own = probe_probabilities(query, key, scaling)
    return torch.matmul(own.to(value.dtype), repeat_heads(value, query.shape[1]))


def full_attention(query: Tensor, key: Tensor, value: Tensor, view: View) -> Tensor:
    """Multi-head attention of every row, each head with its own scores: `[rows, heads, length, head_dim]`, as queries.

    Keys and values are `[rows, kv_heads, keys, head_dim]`: `length` of them, or more where the pass goes on from a
    cache.
    """
    heads, length, rows = query.shape[1], query.shape[2], view.rows
    view = view.choosing(query, key)
    mask = view.mask(0, length)
    one_mask = mask is None or mask.shape[1] == 1
    if length <= FEW_QUERIES and rows.past is not None and key.shape[1] < heads and one_mask:
        # Heads that share keys become queries of one head: keys and values are read where they lie, not copied.
        group = heads // key.shape[1]
        joint = query.reshape(query.shape[0], key.shape[1], group * length, query.shape[3])
        mask = None if mask is None else mask.repeat(1, 1, group, 1)
        out = scaled_dot_product_attention(joint, key, value, attn_mask=mask, scale=view.scaling)
        return out.reshape(*query.shape[:3], value.shape[3])
    return scaled_dot_product_attention(
        query,
        repeat_heads(key, heads),
        repeat_heads(value, heads),
        attn_mask=mask,
        is_causal=mask is None and rows.past is None,
        scale=view.scaling,
    )


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedHeads, view: View, first: int = 0
) -> Tensor:
    """Attention in which each head uses its representative's probabilities with its own values.

    It gives `[rows, heads, queries, head_dim]`. The probabilities of a cluster are computed once and shared; nothing of
    size heads × queries × keys is written for more than a few queries.

    Parameters
    ----------
    query : Tensor [rows, clusters, queries, head_dim]
        Of the representatives, from column `first` on.
    key : Tensor [rows, kept, keys, head_dim]
        Of `shared.key_heads`. There may be free room behind the keys that count; so in `value`.
    value : Tensor [rows, kv_heads, keys, head_dim]
        Of all heads; with `shared.share_value` of `shared.key_heads`.
    """
    membership = shared.membership
    if view.choose is not None:
        view = view.choosing(query, heads_of(key, shared.slot), first)
    if gpu.takes(query, key, value, view):
        out = gpu.attend(query, key, value, shared, view, first)
    elif query.shape[2] <= FEW_QUERIES:
        out = decode.attend(query, key, value, shared, view, first)
    elif shared.share_value:
        alone = Membership.every_head(len(query), membership.clusters, value.device)
        key, value = heads_of(key, shared.slot), heads_of(value, shared.slot)
        out = prefill.attend(query, key, value, alone, view, first)
    else:
        out = prefill.attend(query, heads_of(key, shared.slot), value, membership, view, first)
    # A member whose value is shared has its representative's output.
    return heads_of(out, membership.cluster) if shared.share_value else out
