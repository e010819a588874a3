"""The benchmark of clusters local to each device, on a tiny model: savings, differences, the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import ttest_rel

from chai_eval.benchmark import tensor_parallel
from chai_eval.models import load_model
from tests.methods.calibrations import write_calibration

LAYERS, HEADS = 4, 8
COUNTS = [[8, 3], [1, 1]]


def test_the_record_has_what_each_number_of_devices_loses_more_than_one_at_the_same_saving(tmp_path: Path) -> None:
    model, _ = load_model("tiny_llama_random")
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (LAYERS, HEADS)
    kept = torch.arange(1.0, HEADS + 1).expand(LAYERS, -1)
    tensors = {
        "predicted_divergence": torch.tensor([[9.0], [3], [4], [2]]) * torch.arange(7.0, -1, -1),
        "kept_kv_heads": kept.clone(),
        "output_aware.balanced": torch.tensor([list(range(HEADS))] * 3 + [[2] * HEADS]),
        "output_cost": torch.rand(LAYERS, HEADS, HEADS) * (1 - torch.eye(HEADS)),
    }
    folder = write_calibration(tmp_path / "tiny", model, tensors, presets={"balanced": {"clusters": COUNTS}})
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("the cat sat on a mat while rain fell over hills"[at:] * 9 for at in range(9)))
    asked = ["--model", "tiny_llama_random", "--text", str(text), "--tokens", "40", "--sequences", "4"]
    given = [*asked, "--calibration", str(folder), "--devices", "2,8", "--out", str(tmp_path / "out")]
    found = tensor_parallel.main(given)
    record = json.loads((tmp_path / "out" / "tiny_llama_random-balanced-text.txt.json").read_text())
    methods = record["methods"]
    assert list(found) == list(methods)
    # One of four layers keeps one head's keys of eight. Two devices keep one each of it, and save one head less, unless
    # another layer makes up for that, the one where it costs least; eight devices keep all.
    held = {name: each["kv_held"] for name, each in methods.items()}
    of_all = 2 * LAYERS * HEADS
    assert held["chai, 1 device"] == held["chai, 2 devices, same saving"] == pytest.approx(1 - 7 / of_all, abs=1e-6)
    assert methods["chai, 2 devices, same saving"]["settings"]["clusters"] == [[8, 1], [7, 1], [8, 1], [2, 1]]
    assert held["chai, 2 devices"] == held["output_aware, 2 devices"] == pytest.approx(1 - 6 / of_all, abs=1e-6)
    assert {held[name] for name in held if "8" in name} == {1}
    assert methods["chai, 8 devices, same saving"]["divergence"]["value"] == pytest.approx(0, abs=1e-6)
    one, two = (methods[f"output_aware, {count}"] for count in ("1 device", "2 devices"))
    low, high = ttest_rel(two["per_sequence"], one["per_sequence"]).confidence_interval()
    assert [two["more_than_on_one_device"][end] for end in ("low", "high")] == pytest.approx([low, high], abs=1e-5)
