"""What one batch of samples tells about every layer: who attends like whom, and what serving one by another costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chai_eval.attention import AttentionCall, full_attention, probe_features, probe_probabilities
from chai_eval.attention.masks import Window, within
from chai_eval.attention.membership import cosine_distance
from chai_eval.attention.probe import repeat_heads
from chai_eval.calibration.kmeans import gram


@dataclass(frozen=True)
class Observed:
    """What a batch of samples shows; the first two dimensions are layers and samples.

    Attributes
    ----------
    products_last_row, products_probe : Tensor [layers, samples, heads, heads], float64
        Inner products of the heads' features around their mean: all that clustering by K-Means needs.
    distance_last_row, distance_probe : Tensor [layers, samples, heads, heads], float64
        Cosine distances of the features.
    output_cost : Tensor [layers, samples, heads, heads], float64
        Entry (i, r): mean squared norm, over queries, of the change of the layer's output when head r's probabilities
        serve head i.
    importance : Tensor [layers, samples, heads], float64
        Mean squared norm of what each head adds to the layer's output.
    """

    products_last_row: Tensor
    products_probe: Tensor
    distance_last_row: Tensor
    distance_probe: Tensor
    output_cost: Tensor
    importance: Tensor


@dataclass
class Observer:
    """Full attention that is looked at on its way, as an `Attend` for `take_over`.

    Attributes
    ----------
    factors : sequence of Tensor [heads, head_dim, head_dim]
        See `layers.output_factors`.
    queries : Tensor [n], int64
        Columns whose queries are taken for the costs; keys are all before them.
    probe_tokens : int
    picked : Tensor [m], int64
        Columns at which heads' output norms are kept, for predictors; may be empty.
    """

    factors: Sequence[Tensor]
    queries: Tensor
    probe_tokens: int
    picked: Tensor
    head_norms: dict[int, Tensor] = field(default_factory=dict)
    _seen: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def __call__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = full_attention(query, key, value, call.view)
        last = torch.tensor([query.shape[2] - 1], device=query.device)
        columns = torch.cat((self.queries.to(query.device), last))
        seen = probabilities_at(columns, query, key, call.view.scaling, call.view.window)
        probe = min(self.probe_tokens, query.shape[2])
        block = probe_features(probe_probabilities(query[:, :, :probe], key[:, :, :probe], call.view.scaling))
        cost, importance = serving_costs(seen[:, :, :-1], value, self.factors[call.index])
        last_row = seen[:, :, -1]
        found = (gram(last_row), gram(block), cosine_distance(last_row), cosine_distance(block), cost, importance)
        self._seen[call.index] = tuple(each.cpu() for each in found)
        if len(self.picked):
            self.head_norms[call.index] = out[:, :, self.picked.to(out.device)].float().norm(dim=-1).transpose(1, 2)
        return out

    def observed(self) -> Observed:
        """Everything seen in the pass."""
        by_kind = zip(*(self._seen[layer] for layer in sorted(self._seen)), strict=True)
        return Observed(*(torch.stack(each) for each in by_kind))


def probabilities_at(columns: Tensor, query: Tensor, key: Tensor, scaling: float, window: Window | None) -> Tensor:
    """Attention probabilities of the queries in some columns over all keys, in float32: `[rows, heads, n, keys]`.

    Parameters
    ----------
    columns : Tensor [n], int64
    query : Tensor [rows, heads, length, head_dim]
    key : Tensor [rows, kv_heads, length, head_dim]
    """
    heads, length = query.shape[1], query.shape[2]
    scores = torch.matmul(query[:, :, columns].float(), repeat_heads(key, heads).float().transpose(-1, -2)) * scaling
    at = torch.arange(length, device=query.device)
    hidden = at > columns[:, None]
    if window is not None:
        hidden = hidden | ~within(window, columns[:, None], at)
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1)


def serving_costs(probabilities: Tensor, value: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """What it costs the layer's output when one head's probabilities serve another.

    c(i, r) = E ‖(A_i - A_r) V_i W_O,i‖² over queries: head i keeps its values and its slice of the output projection.

    Parameters
    ----------
    probabilities : Tensor [rows, heads, queries, keys]
    value : Tensor [rows, kv_heads, keys, head_dim]
    factors : Tensor [heads, head_dim, head_dim]
        See `layers.output_factors`.

    Returns
    -------
    Tensor [rows, heads, heads], float64
        Not symmetric; zero on the diagonal.
    Tensor [rows, heads], float64
        E ‖A_i V_i W_O,i‖².
    """
    rows, heads, queries, _ = probabilities.shape
    group = heads // value.shape[1]
    # Every head's probabilities with every head's values: [rows, kv_heads, heads, queries, head_dim].
    mixed = torch.matmul(probabilities.flatten(1, 2)[:, None], value.float()).unflatten(2, (heads, queries))
    cost = torch.empty(rows, heads, heads, dtype=torch.float64, device=value.device)
    importance = torch.empty(rows, heads, dtype=torch.float64, device=value.device)
    for head in range(heads):
        served = mixed[:, head // group]
        factor = factors[head].T
        change = torch.matmul(served - served[:, head : head + 1], factor)
        cost[:, head] = change.square().sum(-1).mean(-1)
        importance[:, head] = torch.matmul(served[:, head], factor).square().sum(-1).mean(-1)
    return cost, importance
