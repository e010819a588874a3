"""Typed settings of a run, validated once, where they enter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelSettings:
    """One entry of `conf/model/`.

    Attributes
    ----------
    name : the choice of `conf/model/`.
    path : a local directory, a hub id, or `asset:<name>` for a model that comes with the assets.
    revision : of a hub model.
    weights : `pretrained`, or `random` to build the model from its config.
    dtype : `auto` is float32 on a CPU and bfloat16 on a GPU.
    device : `auto` is the GPU where there is one.
    layers : keep only the first so many layers.
    device_map : passed to transformers, `auto` spreads the model over several devices.
    trust_remote_code : run model code from the hub.
    untie : repeat K and V projections once per query head: the exact MHA twin of a GQA model.
    config : overrides of the model's config; with `weights: random` the whole of it, `model_type` included.
    tokenizer : a local directory, a hub id, or `builtin`; None takes the model's own.
    clusters : preset name, one count per layer, a run-length list, or None where calibration is needed.
    default_limit : documents per task where the user gives no limit.
    paper : the model's name in the paper's tables.
    """

    name: str
    path: str | None = None
    revision: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    layers: int | None = None
    device_map: str | None = None
    trust_remote_code: bool = False
    untie: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    clusters: str | Sequence[int] | Sequence[Sequence[int]] | None = None
    default_limit: int | None = None
    paper: str | None = None
