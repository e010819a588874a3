"""The exact MHA twin of a GQA model: K and V projections written out once per query head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from chai_eval.attention.shards import in_place_of, own_part
from chai_eval.errors import SettingError


def untie(model: PreTrainedModel) -> PreTrainedModel:
    """Repeat the K and V projections of every layer, in place, until each query head has its own.

    The model computes the same function with H = H_kv; its K,V cache grows by the group size H / H_kv. On a CPU its
    logits are the same to the last bit; elsewhere the larger matrix product may be rounded in another order. A model
    that is MHA already is left as it is.

    SettingError for a model without separate `q_proj`, `k_proj` and `v_proj` in its attention layers, as LLaMA,
    Mistral, Qwen, SmolLM … have.
    """
    # Attention classes share no base: what they have in common is the names.
    names = ("q_proj", "k_proj", "v_proj")
    modules: Iterable[Any] = model.modules()
    layers = [each for each in modules if all(isinstance(getattr(each, name, None), nn.Linear) for name in names)]
    if not layers:
        raise SettingError(
            f"model.untie: a {model.config.model_type} model has no separate K and V projections; "
            "allowed: false, or a model of the LLaMA family"
        )
    for attention in layers:
        groups = int(getattr(attention, "num_key_value_groups", 1))
        if groups > 1:
            for projection in (attention.k_proj, attention.v_proj):
                _repeat_heads(projection, groups, attention.head_dim)
            attention.num_key_value_groups = 1
    if getattr(model.config, "num_key_value_heads", None) is not None:
        model.config.num_key_value_heads = model.config.num_attention_heads
    return model


@torch.no_grad()
def _repeat_heads(projection: nn.Linear, groups: int, head_dim: int) -> None:
    # [H_kv * head_dim, …] -> [H * head_dim, …], query head h taking K/V head h // groups
    for name, rows in list(projection.named_parameters()):
        repeated = own_part(rows).unflatten(0, (-1, head_dim)).repeat_interleave(groups, dim=0).flatten(0, 1)
        setattr(projection, name, nn.Parameter(in_place_of(rows, repeated), rows.requires_grad))
    projection.out_features *= groups
