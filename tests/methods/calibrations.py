"""Calibrations made up for a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from chai_eval.models.fingerprint import identity
from tests.attention.tiny import HEADS, LAYERS


def write_calibration(folder: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A calibration of a model; `changes` replace what it says of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    description = {"layout": 1, "model": {"name": "tiny", **identity(model)}, "presets": {}, "counts": {}, **changes}
    (folder / "calibration.json").write_text(json.dumps(description))
    save_file(tensors, folder / "calibration.safetensors")
    return folder


def random_predictors(width: int = 64, hidden: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {}
    for layer in range(LAYERS):
        found[f"predictor.{layer}.down"] = torch.randn(hidden, width, generator=generator) / width**0.5
        found[f"predictor.{layer}.up"] = torch.randn(HEADS, hidden, generator=generator) / hidden**0.5
    return found
