"""Attention that begins with a probe: every head over the first tokens, representatives from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from chai_eval.attention.clustered import clustered_attention, full_attention, shared_attention
from chai_eval.attention.masks import Chunk, UnsupportedModel, Window, width
from chai_eval.attention.membership import Membership
from chai_eval.attention.passes import ForwardPass, Layer
from chai_eval.attention.probe import probe_probabilities, repeat_heads
from chai_eval.attention.row_layer import PROBE_QUERY, RowLayer

# From queries `[rows, heads, probe, head_dim]` and keys `[rows, kv_heads, probe, head_dim]` of the probe tokens to the
# membership of every row; the last is the scaling of their products.
Choose = Callable[[Tensor, Tensor, float], Membership]


@dataclass(frozen=True)
class Plan:
    """What a method does in a clustered layer: how memberships are found, and what members share.

    Attributes
    ----------
    probe_tokens : int
        Tokens that are attended to by every head before the membership is known; 0 where it is known beforehand.
    choose : Choose or None
        Finds the membership from the probe tokens.
    membership : Membership or None
        Of one row, known beforehand.
    share_value : bool
        Members take their representative's values too.
    """

    probe_tokens: int = 0
    choose: Choose | None = None
    membership: Membership | None = None
    share_value: bool = False

    def membership_of(self, query: Tensor, key: Tensor, scaling: float) -> Membership:
        """From queries and keys of the probe tokens."""
        assert self.choose is not None
        return self.choose(query, key, scaling)

    def check_window(self, window: Window | None) -> None:
        """Refuse a window that some of the probe tokens lie outside of: what heads attend to there is another matter.

        Raises
        ------
        UnsupportedModel
        """
        if window is not None and width(window) < self.probe_tokens:
            what = "chunks of attention" if isinstance(window, Chunk) else "sliding window"
            raise UnsupportedModel(
                f"method.probe_tokens: {self.probe_tokens} given; allowed: 1 to {width(window)}, the model's {what}"
            )

    def known(self, rows: int, device: torch.device) -> Membership:
        """The membership that was known beforehand, for every row."""
        assert self.membership is not None
        one = self.membership
        return Membership(one.cluster.to(device), one.representative.to(device)).expand(rows)


def attend_planned(
    plan: Plan | None, layer: Layer, query: Tensor, key: Tensor, value: Tensor, run: ForwardPass
) -> Tensor:
    """Attention of a pass as a plan says; with every head on its own where there is none.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, length, head_dim]
        Of this pass alone.
    """
    if plan is None:
        return attend_full(layer, query, key, value, run)
    plan.check_window(layer.window)
    store = run.store(layer.index)
    if store is not None and store.membership is not None:
        return attend_kept(layer, query, key, value, run, store, share_value=plan.share_value)
    if plan.probe_tokens:
        return attend_after_probe(layer, query, key, value, run, plan)
    return attend_static(layer, query, key, value, run, plan)


def attend_full(layer: Layer, query: Tensor, key: Tensor, value: Tensor, run: ForwardPass) -> Tensor:
    """Attention of a pass with every head on its own, its keys and values stored where there is a cache."""
    key, value = run.whole(layer.index, key, value)
    return full_attention(query, key, value, run.rows, layer.scaling, layer.window)


def attend_after_probe(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: ForwardPass,
    plan: Plan,
) -> Tensor:
    """Attention of a pass: exact over the probe tokens, clustered by what they showed from then on.

    With a cache, all heads' keys are kept until every row has seen its probe tokens, then those of representatives.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, length, head_dim]
        Of this pass alone.

    Returns
    -------
    Tensor [rows, heads, length, head_dim]
    """
    store, rows = run.store(layer.index), run.rows
    probe_tokens, share_value = plan.probe_tokens, plan.share_value

    def choose(probe_query: Tensor) -> Membership:
        return plan.membership_of(probe_query, key[:, :, :probe_tokens], layer.scaling)

    key, value = run.whole(layer.index, key, value)
    if rows.past is None:
        probe_query = query[:, :, :probe_tokens]
        if rows.length <= probe_tokens:
            out, membership = full_attention(query, key, value, rows, layer.scaling, layer.window), None
        else:
            membership = choose(probe_query)
            early = exact_attention(probe_query, key[:, :, :probe_tokens], value[:, :, :probe_tokens], layer.scaling)
            late = clustered_attention(
                query, key, value, membership, rows, layer.scaling,
                first=probe_tokens, window=layer.window, share_value=share_value,
            )  # fmt: skip
            out = torch.cat((early, late), dim=2)
        if store is None:
            return out
        store.state[PROBE_QUERY] = torch.nn.functional.pad(probe_query, (0, 0, 0, probe_tokens - probe_query.shape[2]))
    else:
        assert store is not None
        probe_query = _with_probe(store.state[PROBE_QUERY], query, run)
        store.state[PROBE_QUERY] = probe_query
        membership = choose(probe_query) if key.shape[2] > probe_tokens else None
        out = full_attention(query, key, value, rows, layer.scaling, layer.window)
        if membership is not None:  # rows that have not seen their probe yet stay as they are
            shared = clustered_attention(
                query, key, value, membership, rows, layer.scaling, window=layer.window, share_value=share_value
            )
            column = rows.past[:, None] + torch.arange(rows.length, device=query.device)
            out = torch.where((column >= probe_tokens)[:, None, :, None], shared, out)
    if rows.shortest >= probe_tokens:
        if membership is None:
            membership = choose(store.state[PROBE_QUERY])
        store.keep_only(membership, share_value=share_value)
        del store.state[PROBE_QUERY]
    return out


def attend_static(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: ForwardPass,
    plan: Plan,
) -> Tensor:
    """Attention of a pass under a membership that was known before the request: clustered from the first token on.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, length, head_dim]
        Of this pass alone.
    """
    store, share_value = run.store(layer.index), plan.share_value
    membership = plan.known(query.shape[0], query.device)
    key, value = run.whole(layer.index, key, value)
    if store is not None:
        store.keep_only(membership, share_value=share_value)
    return clustered_attention(
        query, key, value, membership, run.rows, layer.scaling, window=layer.window, share_value=share_value
    )


def attend_kept(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: ForwardPass,
    store: RowLayer,
    *,
    share_value: bool = False,
) -> Tensor:
    """Attention of a pass that goes on from a cache which keeps representatives' keys only.

    Parameters
    ----------
    query : Tensor [rows, heads, length, head_dim]
    key, value : Tensor [rows, kv_heads, length, head_dim]
        Of this pass alone.
    """
    assert store.membership is not None
    row = torch.arange(query.shape[0], device=query.device)[:, None]
    kept_query = query[row, store.membership.representative]
    kept_value = store.kept(value) if share_value else value
    store.append(store.kept(key), kept_value, run.rows)
    return shared_attention(
        kept_query, *store.with_room(), store.membership, run.rows, layer.scaling,
        slot=store.slot, window=layer.window, share_value=share_value,
    )  # fmt: skip


def exact_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of the probe tokens, every head by its own scores in float32."""
    own = probe_probabilities(query, key, scaling)
    return torch.matmul(own.to(value.dtype), repeat_heads(value, query.shape[1]))


def _with_probe(kept: Tensor, query: Tensor, run: ForwardPass) -> Tensor:
    """Queries of the probe tokens with those among this pass's put in their columns."""
    rows, probe_tokens = run.rows, kept.shape[2]
    assert rows.past is not None
    offset = torch.arange(rows.length, device=query.device)
    column = rows.past[:, None] + offset  # [rows, length]
    row, new = torch.nonzero((column < probe_tokens) & (offset < rows.lengths[:, None]), as_tuple=True)
    filled = kept.clone()
    filled[row, :, column[row, new]] = query[row, :, new]
    return filled
