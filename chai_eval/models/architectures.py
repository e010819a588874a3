"""Models built from a config: how large, how many layers, filled with reproducible random weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from chai_eval.errors import SettingError, closest

SEED = 0
# Up to this many parameters random weights are drawn on the CPU, the same for every device.
_DRAWN_ON_CPU = 1_000_000_000


def config_from_mapping(values: Mapping[str, Any]) -> PretrainedConfig:
    """A config from its whole content; SettingError where that makes none."""
    values = dict(values)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise SettingError(
            "model.config: no model_type given, and model.path names no local model; allowed: llama, opt …"
        )
    try:
        default = AutoConfig.for_model(model_type)
        for name, value in values.items():
            if not _is_field(default, name) and not _is_converted(default, name, value):
                raise _no_field(default, name)
        return AutoConfig.for_model(model_type, **values)
    except SettingError:
        raise
    except Exception as error:  # transformers validates with several libraries, each with its own errors
        raise SettingError(f"model.config: makes no {model_type} model ({reason(error)})") from error


def _is_field(config: PretrainedConfig, name: str) -> bool:
    return hasattr(config, name) and not callable(getattr(type(config), name, None))


def _is_converted(default: PretrainedConfig, name: str, value: Any) -> bool:
    """Whether a name that is no field is read nevertheless, as `rope_theta` is; one that isn't is only stored."""
    given = type(default)(**{name: value})
    return not hasattr(given, name) or {**default.to_dict(), name: None} != {**given.to_dict(), name: None}


def _no_field(config: PretrainedConfig, name: str) -> SettingError:
    fields = [each for each in config.to_dict() if not each.startswith("_")]
    said = f"model.config: a {config.model_type} model has no {name}{closest(name, fields)}"
    return SettingError(f"{said}; allowed: fields of its config")


def with_changes(config: PretrainedConfig, changes: Mapping[str, Any], layers: int | None) -> PretrainedConfig:
    """A copy of `config` with `changes` made and only its first `layers` layers; SettingError where it lacks them."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        if name == "model_type" and value != config.model_type:
            raise SettingError(
                f"model.config: model_type {value} given for a {config.model_type} model; allowed: changes"
            )
        if not _is_field(config, name):
            raise _no_field(config, name)
        setattr(config, name, value)
    whole = int(config.num_hidden_layers)
    if layers is None or layers == whole:
        return config
    if not 1 <= layers < whole:
        raise SettingError(f"model.layers: {layers} given for a model of {whole} layers; allowed: 1 to {whole}")
    for name, value in config.to_dict().items():  # one entry per layer, such as layer_types
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return config


def random_model(
    config: PretrainedConfig, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model with random weights, the same at every call; the global random state is left as it was.

    SettingError where the config contradicts itself, such as a hidden size that its heads don't divide.
    """
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads is not None and heads % kv_heads:
        raise SettingError(
            f"model.config: num_key_value_heads {kv_heads} given for {heads} heads; allowed: a divisor of {heads}"
        )
    trust = {"trust_remote_code": trust_remote_code}
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config, **trust).parameters())
    except Exception as error:
        raise SettingError(f"model.config: makes no {config.model_type} model ({reason(error)})") from error
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=True):
        torch.manual_seed(SEED)
        if size <= _DRAWN_ON_CPU:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trust).to(device=device, dtype=dtype)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **trust)


def reason(error: Exception) -> str:
    """One line of an error of transformers: its first line, and the next where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]
