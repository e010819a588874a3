"""What can't be split over processes is told in one line, before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chai_eval.errors import SettingError
from chai_eval.models import load_model
from tests.attention.tiny import MODELS


@pytest.mark.parametrize(
    ("model", "processes", "changes", "line"),
    [
        ("llama", 1, {}, "true given in one process; allowed: false, or several, started by torchrun"),
        ("opt", 2, {}, "true given for opt, for which transformers has no plan; allowed: false, or models"),
        ("llama_gqa", 4, {}, "true given in 4 processes for a model of 2 key heads; allowed: as many processes as"),
        ("llama", 3, {"untie": True}, "true given in 3 processes for a model of 8 key heads; allowed: as many"),
        ("llama", 2, {"weights": "random"}, "true given together with weights=random; allowed: false"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model: str, processes: int, changes: dict[str, object], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS[model]().save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    given = {"path": str(tmp_path), "tokenizer": "builtin", "device": "cpu", "tensor_parallel": True, **changes}
    with pytest.raises(SettingError) as raised:
        load_model("local", **given)
    assert str(raised.value).startswith(f"model.tensor_parallel: {line}")


def test_a_device_map_or_a_device_that_transformers_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"path": str(tmp_path), "tokenizer": "builtin", "tensor_parallel": True, "device": "cpu"}
    with pytest.raises(SettingError, match="model.device_map: 'auto' given with tensor_parallel=true; allowed: null"):
        load_model("local", device_map="auto", **given)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    with pytest.raises(SettingError, match="model.device: cpu given with tensor_parallel=true on a machine with cuda"):
        load_model("local", **given)
