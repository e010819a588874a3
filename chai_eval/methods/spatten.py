"""SpAtten-like cascade pruning of tokens and heads (Wang et al., HPCA 2021, arXiv 2012.09852), made causal."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Rows, Source, View, stored
from chai_eval.attention.kernels.prefill import probability_blocks
from chai_eval.attention.probe import repeat_heads
from chai_eval.methods.base import Fraction, FromZero, Method
from chai_eval.methods.keep import highest, kept_count, kept_counts
from chai_eval.schema import SETTINGS

RECEIVED, MAGNITUDE = "spatten_received", "spatten_magnitude"
KEYS, HEADS = "spatten_keys", "spatten_heads"

# Importance of a query's own key: more than any key can receive.
ALWAYS = 1e30


@dataclass(frozen=True, config=SETTINGS)
class SpAtten(Method):
    """Each query reads only the keys, and uses only the heads, that mattered most in the layers before.

    For the query at position t of its request, in layer l: a key's importance is the attention probability that it
    received from queries up to t, summed over heads and over layers before l; a head's importance is the L1 norm (sum
    of absolute values) of its output before the output projection, summed over queries up to t and, by head index,
    over layers before l. The query keeps the top ⌈(1 − s_token)(t + 1)⌉ keys, its own always among them, and the top
    ⌈(1 − s_head) H⌉ heads; never one that an earlier layer dropped for it. No query is influenced by a later one; in
    a row with branches a query's history is the context and its own branch.

    As the ratios are the same in every layer and a key or head that was dropped never returns, what the first layer
    that prunes keeps for a query is what all later layers keep: importance is gathered in the spared layers only.

    Approximates: the scores of dropped keys are minus infinity, the output of dropped heads zero. Saves the attention
    over dropped keys and in dropped heads; not their cache, as a later query may keep what this one drops.

    Parameters
    ----------
    token_sparsity, head_sparsity : float
        Fractions of keys and of heads that are dropped.
    spare_layers : int
        First layers, which prune nothing. With 0 there is no importance yet: the first keys and heads stay.
    """

    token_sparsity: Fraction = 0.3
    head_sparsity: Fraction = 0.0
    spare_layers: FromZero = 2

    name: ClassVar[str] = "spatten"

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return _Cascade(self)


class _Cascade(Hooks):
    """Importance is noted in the spared layers, and says in the others which keys and heads are used (`SpAtten`)."""

    def __init__(self, settings: SpAtten) -> None:
        super().__init__()
        self.token_sparsity, self.head_sparsity = settings.token_sparsity, settings.head_sparsity
        self.spare_layers = settings.spare_layers

    def keys(self, call: AttentionCall, source: Source) -> Tensor | None:
        if call.index < self.spare_layers or self.token_sparsity == 0:
            return None
        carried = call.forward.carried
        if KEYS not in carried:
            carried[KEYS] = kept_keys(carried.get(RECEIVED), _history(call), call.rows, self.token_sparsity)
        return carried[KEYS].to(source.device)[:, None]  # [rows, 1, length, keys]

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        if call.index >= self.spare_layers or self.token_sparsity == 0:
            return None
        key, value = stored(call.store, source.key(), source.value(), call.rows)
        out, received = _attention_received(source.query(), key, value, call.view)
        _note(call, RECEIVED, received)
        return out

    def heads(self, call: AttentionCall, out: Tensor) -> Tensor:
        if self.head_sparsity == 0:
            return out
        if call.index < self.spare_layers:
            _note(call, MAGNITUDE, out.float().abs().sum(-1).transpose(1, 2))
            return out
        carried, rows, heads = call.forward.carried, call.rows, out.shape[1]
        if HEADS not in carried:
            importance = carried.get(MAGNITUDE, out.new_zeros(rows.count, rows.length, heads))
            carried[HEADS] = highest(importance, kept_count(heads, self.head_sparsity)).transpose(1, 2)
        return out.masked_fill(~carried[HEADS].to(out.device)[..., None], 0)


def kept_keys(importance: Tensor | None, seen: Tensor, rows: Rows, sparsity: float) -> Tensor:
    """The keys that each query keeps.

    Parameters
    ----------
    importance : Tensor [rows, length, keys] or None
        Of each key as each query sees it; None where nothing is known yet.
    seen : Tensor [rows or 1, length, keys], bool
        The keys that came before each query.

    Returns
    -------
    Tensor [rows, length, keys], bool
    """
    keys = seen.shape[2]
    if importance is None:
        importance = seen.new_zeros(rows.count, rows.length, keys, dtype=torch.float32)
    seen = seen.to(importance.device)
    column = torch.arange(rows.length, device=importance.device).expand(rows.count, -1)
    own = column if rows.past is None else (column + rows.past[:, None]).clamp(max=keys - 1)
    position = own if rows.position is None else rows.position
    ranked = importance.masked_fill(~seen, -1.0).scatter(2, own[..., None], ALWAYS)
    return highest(ranked, kept_counts(position + 1, sparsity)) & seen


def _history(call: AttentionCall) -> Tensor:
    """The keys that came before each query, whatever the layer's window: `[rows or 1, length, keys]`, bool."""
    return call.forward.view(call.view.scaling, None).whole_mask()[:, 0]


def _attention_received(query: Tensor, key: Tensor, value: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Attention, and what each query gave to each key over all heads: `[rows, length, keys]`, float32."""
    count, heads, length, _ = query.shape
    own_value = repeat_heads(value, heads)
    out = value.new_empty(count, heads, length, value.shape[-1])
    received = torch.zeros(count, length, key.shape[2], device=query.device)
    for block, probabilities in probability_blocks(query, key, view):
        received[:, block] = probabilities.sum(1)
        out[:, :, block] = torch.matmul(probabilities.to(value.dtype), own_value)
    return out, received


def _note(call: AttentionCall, name: str, given: Tensor) -> None:
    """Add what queries gave in this layer (`[rows, length, n]`) to the importance that each of them sees.

    What earlier passes gave is remembered with the cache, as the last token of this pass saw it.
    """
    rows, state = call.rows, call.state
    seen = given.cumsum(1) if rows.branch is None else _history(call).to(given.dtype) @ given
    before = state.get(name)
    earlier = seen.new_zeros(rows.count, given.shape[-1])
    if before is not None:
        earlier = pad(before, (0, given.shape[-1] - before.shape[-1]))
        seen = seen + earlier[:, None]
    last = seen[torch.arange(rows.count, device=seen.device), (rows.lengths - 1).clamp(min=0)]
    # Of a row without a token in this pass, what stands there is padding.
    state[name] = torch.where((rows.lengths > 0)[:, None], last, earlier)
    carried = call.forward.carried.get(name)
    call.forward.carried[name] = seen if carried is None else carried.to(seen.device) + seen
