"""Where a model is put, and in which precision."""

from __future__ import annotations

import logging

import torch

from chai_eval.attention.kernels.decode import multiplies
from chai_eval.errors import SettingError

log = logging.getLogger(__name__)


def resolve_device(device: str) -> torch.device:
    """The device meant: `auto` is the first GPU, or the CPU where there is none; SettingError where it isn't there."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found else 0
    allowed = ", ".join(["auto", "cpu", *(f"{found.type}:{index}" for index in range(count) if found)])
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise SettingError(f"model.device: {device!r} is unknown; allowed: {allowed}") from None
    if wanted.type == "cpu":
        return wanted
    if found is None or wanted.type != found.type or (wanted.index or 0) >= count:
        raise SettingError(f"model.device: this machine has no {device}; allowed: {allowed}")
    return torch.device(wanted.type, wanted.index or 0)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype meant by `dtype`; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    chosen = ("float32" if device.type == "cpu" else "bfloat16") if dtype == "auto" else dtype
    found = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[chosen]
    if not multiplies(found, device):
        log.warning(
            "model.dtype: this processor has no instructions for %s, which PyTorch then multiplies about a hundred "
            "times more slowly than float32",
            chosen,
        )
    return found
