"""A model whose heads transformers has split over several processes (tensor parallel): which of them are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_layers


@dataclass(frozen=True)
class Shard:
    """The part of the heads that this process has: the `rank`-th (from 0) of `size` equal blocks of neighbours."""

    rank: int = 0
    size: int = 1


def shard(model: PreTrainedModel) -> Shard:
    """Which part of a model's heads this process has; all of an ordinary model's."""
    if (getattr(model, "tp_size", None) or 1) == 1:
        return Shard()
    weights: Any = attention_layers(model)[0].parameters()
    mesh = next(each.device_mesh for each in weights if hasattr(each, "device_mesh"))
    return Shard(mesh.get_local_rank(), mesh.size())


def own_part(weight: Any) -> Tensor:
    """The part of a weight that this process has, as an ordinary tensor."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def whole(weight: Any) -> Tensor:
    """All of a weight, as an ordinary tensor; every process that has a part of it must ask."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def in_place_of(weight: Any, part: Tensor) -> Tensor:
    """What stands for a weight where this process's part of it is another one; all processes change theirs alike."""
    if not hasattr(weight, "to_local"):
        return part
    return type(weight).from_local(part, weight.device_mesh, weight.placements, run_check=False)
