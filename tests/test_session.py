"""What a loaded model's hashes tell apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from chai_eval.models import load_model, model_settings
from chai_eval.session import load

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

from .scale import SCALE


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, tokenizer = load_model("tiny_llama_random", device="cpu", layers=1)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def architecture(path: Path) -> str:
    return load(model_settings("local", path=str(path), device="cpu", trust_remote_code=True)).architecture


def test_how_texts_are_generated_is_part_of_the_architecture(saved: Path) -> None:
    before = architecture(saved)
    assert architecture(saved) == before
    generation = json.loads((saved / "generation_config.json").read_text())
    (saved / "generation_config.json").write_text(json.dumps({**generation, "transformers_version": "0"}))
    assert architecture(saved) == before
    (saved / "generation_config.json").write_text(json.dumps({**generation, "repetition_penalty": 1.5}))
    assert architecture(saved) != before


def test_code_that_came_with_the_weights_is_part_of_the_architecture(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (saved / "own.py").write_text(OWN_CODE)
    (saved / "scale.py").write_text("SCALE = 1\n")
    config = json.loads((saved / "config.json").read_text())
    config |= {
        "model_type": "own_llama",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (saved / "config.json").write_text(json.dumps(config))
    found = [architecture(saved), architecture(saved)]
    assert found[0] == found[1]
    for changed in ("own.py", "scale.py"):
        (saved / changed).write_text((saved / changed).read_text() + "# other\n")
        found.append(architecture(saved))
    assert len(set(found)) == 3
