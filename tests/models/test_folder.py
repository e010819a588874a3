"""What lies at a path is a whole model, or the line says what to do with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants

from chai_eval.cli import main
from chai_eval.errors import SettingError
from chai_eval.models import load, load_model, model_settings

SAID = (
    r"^model\.path: .* holds an adapter \(adapter_config\.json\); allowed: a whole model, so merge it .*first [^\n]*$"
)


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    described = {"peft_type": "LORA", "base_model_name_or_path": "huggyllama/llama-7b", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside a model", "alone"])
@pytest.mark.parametrize("peft", [True, False], ids=["with PEFT", "without"])
def test_an_adapter_is_refused_with_what_to_do_first(
    weights: str, beside: bool, peft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.models.auto.auto_factory, "is_peft_available", lambda: peft)
    if beside:
        load_model("tiny_llama_random", device="cpu")[0].save_pretrained(tmp_path)
    with pytest.raises(SettingError, match=SAID):
        load_model("local", path=adapter(tmp_path), device="cpu", weights=weights)


def test_an_adapter_from_the_hub_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--lora"
    adapter(folder / "snapshots" / "0")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    with pytest.raises(SettingError, match=SAID):
        load_model("local", path="someone/lora", device="cpu")


def test_a_run_is_refused_before_its_documents_are_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"path={adapter(tmp_path / 'lora')}", "task=piqa", f"data_dir={tmp_path}/none"]
    assert main([*given, f"results_dir={tmp_path}/results"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "merge it into its base model first" in error
    assert not (tmp_path / "results").exists()


def test_a_tokenizer_beside_an_adapter_is_taken(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    model.save_pretrained(tmp_path / "merged")
    tokenizer.save_pretrained(adapter(tmp_path / "lora"))
    settings = model_settings("local", path=str(tmp_path / "merged"), tokenizer=str(tmp_path / "lora"), device="cpu")
    merged, own = load(settings)
    tokens = own("the same", return_tensors="pt").input_ids
    assert torch.equal(merged(tokens).logits, model(tokens).logits)
