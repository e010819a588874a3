"""A model split over processes by transformers (tensor parallel): what it is told, and what can't be split."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from chai_eval.errors import SettingError
from chai_eval.settings import ModelSettings

SETTING = "model.tensor_parallel"


def split_over_processes(settings: ModelSettings, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told to load this process's part of a model; nothing where it isn't to be split.

    Raises
    ------
    SettingError
        In a single process, for a model without a plan for it or whose key heads can't be divided, for a device map,
        and for a device that isn't the one that transformers takes.
    """
    if not settings.tensor_parallel:
        return {}
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        raise SettingError(f"{SETTING}: true given in one process; allowed: false, or several, started by torchrun")
    if settings.device_map is not None:
        raise SettingError(f"model.device_map: {settings.device_map!r} given with tensor_parallel=true; allowed: null")
    taken = torch.accelerator.current_accelerator(check_available=True)
    if device.type != (taken or device).type:
        raise SettingError(
            f"model.device: {settings.device} given with tensor_parallel=true on a machine with {taken}; allowed: auto"
        )
    text = config.get_text_config()
    if not text.base_model_tp_plan:
        raise SettingError(
            f"{SETTING}: true given for {config.model_type}, for which transformers has no plan; allowed: "
            "false, or models with one, such as llama, gpt_neox, qwen2, mistral"
        )
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if kv_heads % size:
        raise SettingError(
            f"{SETTING}: true given in {size} processes for a model of {kv_heads} key heads; allowed: as many "
            "processes as divide them"
        )
    return {"distributed_config": DistributedConfig(tp_size=size)}
