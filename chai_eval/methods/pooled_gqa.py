"""Key and value heads averaged in groups: grouped-query attention (Ainslie et al., arXiv 2305.13245), untrained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source, attention_layers, full_attention, stored
from chai_eval.attention.shape import attention_shape
from chai_eval.errors import SettingError
from chai_eval.methods.base import LayerFootprint, Method, Positive
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class PooledGQA(Method):
    """Queries of all heads of a group read one key head and one value head: the mean of the group's own.

    Section 2.1 of the paper, which then trains on; here nothing is trained. The mean of keys is what the mean of their
    projections gives, rotary embedding included.

    Approximates: keys and values of the heads of a group are one. Saves the cache of the others, and the reading of it.

    Parameters
    ----------
    groups : int
        Key heads that are left; it divides those of the model. 1 is multi-query attention.
    by : "neighbours" or "similarity"
        Which heads make a group: those beside each other, or those whose key projections are most alike
        (`similar_first`).
    """

    groups: Positive = 1
    by: Literal["neighbours", "similarity"] = "neighbours"

    name: ClassVar[str] = "pooled_gqa"

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        return [cls(groups=groups) for groups in _divisors(attention_shape(model).kv_heads)[-2::-1]]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        kv_heads = self._kv_heads(model)
        order = torch.arange(kv_heads).expand(attention_shape(model).layers, -1)
        if self.by == "similarity":
            order = torch.stack([similar_first(each, kv_heads // self.groups) for each in _key_weights(model)])
        return _Pooling(order, self.groups)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        self._kv_heads(model)
        shape = attention_shape(model)
        return [LayerFootprint(shape.heads, shape.heads, self.groups, self.groups)] * shape.layers

    def _kv_heads(self, model: PreTrainedModel) -> int:
        kv_heads = attention_shape(model).kv_heads
        if kv_heads % self.groups:
            allowed = ", ".join(map(str, _divisors(kv_heads)))
            raise SettingError(
                f"method.groups: {self.groups} given for a model of {kv_heads} key heads; allowed: {allowed}"
            )
        return kv_heads


class _Pooling(Hooks):
    """Attention on pooled heads, whose queries stand beside each other.

    Parameters
    ----------
    order : Tensor [layers, kv_heads], int64
        Key heads, group after group.
    groups : int
    """

    def __init__(self, order: Tensor, groups: int) -> None:
        super().__init__()
        self.order, self.groups = order, groups

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        order, query = self.order[call.index].to(source.device), source.query()
        by_key = query.unflatten(1, (len(order), -1))  # [rows, kv_heads, query heads of each, length, head_dim]
        key, value = (each[:, order].unflatten(1, (self.groups, -1)).mean(2) for each in (source.key(), source.value()))
        key, value = stored(call.store, key, value, call.rows)
        out = full_attention(by_key[:, order].flatten(1, 2), key, value, call.view)
        return out.view(by_key.shape)[:, order.argsort()].flatten(1, 2)


def similar_first(weights: Tensor, size: int) -> Tensor:
    """Heads in an order in which each `size` of them make a group.

    The first head that is in no group yet makes one with those of the others that are most like it, by the cosine of
    their weights; of heads that are alike the first.

    Parameters
    ----------
    weights : Tensor [heads, n]

    Returns
    -------
    Tensor [heads], int64
    """
    unit = torch.nn.functional.normalize(weights.double(), dim=1)
    alike = unit @ unit.T
    left, order = torch.arange(len(weights), device=weights.device), []
    while len(left):
        first, others = left[:1], left[1:]
        others = others[alike[left[0], others].argsort(descending=True, stable=True)]
        order += [first, others[: size - 1]]
        left = others[size - 1 :].sort().values
    return torch.cat(order)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _key_weights(model: PreTrainedModel) -> list[Tensor]:
    """The key projection of each layer, `[kv_heads, head_dim * hidden_size]`: rows in the order of rotary planes."""
    modules = attention_layers(model)
    found = [getattr(modules[layer], "k_proj", None) for layer in range(len(modules))]
    projections = [each for each in found if isinstance(each, torch.nn.Linear)]
    if len(projections) < len(found):
        raise SettingError(
            f"method.by: similarity given for a {model.config.model_type} model, which has no k_proj of its own; "
            "allowed: neighbours"
        )
    kv_heads = attention_shape(model).kv_heads
    return [each.weight.detach().unflatten(0, (kv_heads, -1)).flatten(1) for each in projections]
