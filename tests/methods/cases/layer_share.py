"""`layer_share`: probabilities are remembered from the last layer that has its own."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import MOMENTS, write_calibration
from chai_eval.models.fingerprint import identity
from tests.attention.tiny import HeadLoop
from tests.methods.cases.case import Case
from tests.methods.loops import every_head


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def cheapest(count: int) -> Any:
    """Settings by a calibration in which the last layer costs less than the one before it, and the first nothing."""

    def settings(model: PreTrainedModel) -> dict[str, Any]:
        where = Path(folder().name) / f"{model.config.model_type}-{attention_shape(model).kv_heads}"
        costs = {"layer_share": torch.tensor([0.0, 2.0, 1.0])}
        write_calibration(where, {"model": {"name": "tiny", **identity(model)}}, costs, MOMENTS)
        return {"costs": str(where), "count": count}

    return settings


def layer_share_loop(takers: list[int]) -> HeadLoop:
    last: dict[str, np.ndarray] = {}

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        if layer not in takers:
            last["own"] = probabilities
        return every_head(last["own"], values)

    return layer_output


CASES = {
    "layer_share": Case("layer_share", {"layers": [1]}, lambda: layer_share_loop([1])),
    "layer_share_run": Case("layer_share", {"layers": [2, 1]}, lambda: layer_share_loop([1, 2])),
    "layer_share_cheapest": Case("layer_share", cheapest(1), lambda: layer_share_loop([2])),
}
NOTHING = {"layer_share": {"layers": []}}
