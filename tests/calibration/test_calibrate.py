"""The whole offline phase on a tiny random model, and what ends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chai_eval.calibrate import calibrate, held_for_calibration
from chai_eval.calibration import collect as collect_module
from chai_eval.calibration import progress
from chai_eval.calibration.settings import CalibrationSettings
from chai_eval.cli.overrides import composed
from chai_eval.errors import RunError, SettingError
from chai_eval.methods import build_method
from chai_eval.methods.clusters import preset_runs
from chai_eval.models import load_model
from chai_eval.schema import read

WORDS = "the cat sat on a mat while rain fell over hills and old men told tales of ships"


@pytest.fixture
def text(tmp_path: Path) -> str:
    drawn = torch.Generator().manual_seed(0)
    words = WORDS.split()
    lines = [" ".join(words[at] for at in torch.randint(len(words), (30,), generator=drawn)) for _ in range(30)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(lines))
    return str(path)


def settings(text: str, out: Path, *changes: str) -> CalibrationSettings:
    few = ("samples=12", "tokens=32", "batch_tokens=64", "starts=2", "sensitivity_samples=2", "predictor=false")
    values = composed("calibrate", ["model=tiny_llama_random", f"text={text}", f"out={out}", *few, *changes])
    return read(CalibrationSettings, values)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "calibration.safetensors")


@torch.no_grad()
def test_methods_read_what_calibration_wrote(text: str, tmp_path: Path) -> None:
    folder = calibrate(settings(text, tmp_path / "c", "predictor=true"), "command")
    description = json.loads((folder / "calibration.json").read_text())
    model, _ = load_model("tiny_llama_random", device="cpu")
    ids = torch.arange(1, 30)[None]
    stock = model(ids).logits
    for preset, described in description["presets"].items():
        # Each merge saves 1/2HL of the cache: the last one is all that may be too much.
        wanted = {"conservative": 0.07, "balanced": 0.14, "aggressive": 0.21}[preset]
        assert 0 <= described["kv_saving"] - wanted <= 1 / (2 * 8 * 4)
        assert described["divergence"] > 0
        assert described["output_aware"]["divergence"] > 0
        for method in (
            build_method("chai", clusters=described["clusters"]),
            build_method("chai_static", membership=str(folder), preset=preset),
            build_method("output_aware", membership=str(folder), preset=preset),
        ):
            with method.applied(model):
                assert not torch.equal(model(ids).logits, stock)
    with build_method("dejavu", selector="predictor", predictor=str(folder)).applied(model):
        assert not torch.equal(model(ids).logits, stock)
    assert description["provenance"]["samples"] == 12
    assert 0.5 <= description["predictor_recall"]["0.5"]["mean"] <= 1
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_counts_of_a_calibration_are_presets(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path))
    folder = calibrate(replace(settings(text, tmp_path), out=None), "command")
    assert folder == tmp_path / "calibration" / "tiny_llama_random"
    presets = json.loads((folder / "calibration.json").read_text())["presets"]
    assert preset_runs("tiny_llama_random-aggressive") == presets["aggressive"]["clusters"]


def test_interrupted_calibration_ends_as_an_uninterrupted_one(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calibrate(settings(text, tmp_path / "whole", "predictor=true"), "command")
    for often in ("SECONDS_BETWEEN_SAVES", "SAVES_PER_COST"):
        monkeypatch.setattr(progress, often, 0.0)
    read = collect_module._read_batch
    left = [3]

    def interrupted(*given) -> None:  # type: ignore[no-untyped-def]
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        read(*given)

    monkeypatch.setattr(collect_module, "_read_batch", interrupted)
    broken = settings(text, tmp_path / "broken", "predictor=true")
    with pytest.raises(KeyboardInterrupt):
        calibrate(broken, "command")
    assert not (tmp_path / "broken" / "calibration.json").exists()
    left[0] = 3  # of 6: had it started anew, it would be interrupted again
    resumed = calibrate(broken, "command")
    first, second = tensors(whole), tensors(resumed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_processes_do_not_calibrate_into_one_folder(text: str, tmp_path: Path) -> None:
    with (
        held_for_calibration(tmp_path / "c"),
        pytest.raises(RunError, match="out: another process is calibrating into"),
    ):
        calibrate(settings(text, tmp_path / "c"), "command")


def test_samples_are_summed_whatever_their_batch(text: str, tmp_path: Path) -> None:
    first = tensors(calibrate(settings(text, tmp_path / "a"), "command"))
    other = tensors(calibrate(settings(text, tmp_path / "b", "batch_tokens=128"), "command"))
    for name in ("distance.last_row", "distance.probe", "kept_kv_heads"):
        torch.testing.assert_close(first[name], other[name], atol=1e-5, rtol=1e-4)


def test_fewer_samples_than_asked_are_used_and_said(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="chai_eval"):
        folder = calibrate(settings(text, tmp_path / "c", "samples=100000"), "command")
    samples = json.loads((folder / "calibration.json").read_text())["provenance"]["samples"]
    assert any("100000 samples" in each.message and f"{samples} samples" in each.message for each in caplog.records)


@pytest.mark.parametrize(("samples", "calibrated", "measured"), [(1, 1, 1), (3, 3, 2), (8, 8, 2), (9, 5, 2)])
def test_of_a_short_text_nothing_is_held_out_that_calibration_needs(
    text: str, tmp_path: Path, samples: int, calibrated: int, measured: int
) -> None:
    short = tmp_path / "short.txt"
    words = Path(text).read_text().split()
    tokenizer = load_model("tiny_llama_random", device="cpu")[1]
    short.write_text(tokenizer.decode(tokenizer(" ".join(words))["input_ids"][: samples * 31]))
    folder = calibrate(settings(str(short), tmp_path / "c"), "command")
    provenance = json.loads((folder / "calibration.json").read_text())["provenance"]
    assert (provenance["samples"], provenance["sensitivity_samples"]) == (calibrated, measured)


@pytest.mark.parametrize("rule", ["elbow", "tolerance"])
@pytest.mark.parametrize("algorithm", ["kmeans", "average"])
def test_every_rule_gives_counts_in_order(text: str, tmp_path: Path, rule: str, algorithm: str) -> None:
    chosen = settings(text, tmp_path / "c", f"rule={rule}", f"algorithm={algorithm}", "features=probe")
    presets = json.loads((calibrate(chosen, "command") / "calibration.json").read_text())["presets"]
    savings = [presets[name]["kv_saving"] for name in ("conservative", "balanced", "aggressive")]
    assert savings == sorted(savings)


def test_error_curves_are_computed_for_rules_that_read_them_and_change_nothing_else(text: str, tmp_path: Path) -> None:
    budget = tensors(calibrate(settings(text, tmp_path / "a", "predictor=true"), "command"))
    elbow = tensors(calibrate(settings(text, tmp_path / "b", "predictor=true", "rule=elbow"), "command"))
    assert elbow.keys() - budget.keys() == {"error_curves"}
    chosen = ("static_membership.", "output_aware.")
    assert all(torch.equal(each, elbow[name]) for name, each in budget.items() if not name.startswith(chosen))


def test_progress_of_a_rule_without_error_curves_is_not_taken_up_by_one_that_reads_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("chai_eval.calibrate.true_divergences", interrupted)
        calibrate(settings(text, tmp_path / "one"), "command")
    again = tensors(calibrate(settings(text, tmp_path / "one", "rule=elbow"), "command"))
    anew = tensors(calibrate(settings(text, tmp_path / "other", "rule=elbow"), "command"))
    assert all(torch.equal(each, again[name]) for name, each in anew.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 4096}, "tokens: 4096 given; allowed: 8 to 2048"),
        ({"text": "/nowhere/text.txt"}, "text: /nowhere/text.txt is no file"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(text: str, tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        calibrate(replace(settings(text, tmp_path / "c"), **change), "command")  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("samples=0", "samples: 0 given; allowed: a whole number from 1 up"),
        ("features=middle", "features: 'middle' given; allowed: last_row, probe"),
        ("saving=[0.1,0.2]", "saving: .* allowed: three numbers"),
        ("rule=fair", "rule: 'fair' given; allowed: budget, elbow, tolerance"),
        ("sampels=3", r"did you mean samples\?"),
        ("model=gpt17", "model: 'gpt17' is unknown"),
        ("predictor=perhaps", "predictor: 'perhaps' given; allowed: true, false"),
        ("samples", "samples: not understood"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(text: str, tmp_path: Path, argument: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        settings(text, tmp_path / "c", argument)
    assert "\n" not in str(caught.value)


def test_damaged_progress_is_named_and_collected_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    whole = calibrate(settings(text, tmp_path / "whole"), "command")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("chai_eval.calibrate.true_divergences", interrupted)
        calibrate(settings(text, tmp_path / "broken"), "command")
    files = [*(tmp_path / "broken").glob(".progress-*/sums-*.pt")]
    files += (tmp_path / "broken").glob(".progress-*/sensitivity-*.pt")
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    first, second = tensors(whole), tensors(calibrate(settings(text, tmp_path / "broken"), "command"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [line.partition(": ")[0] for line in warnings()] == [str(file) for file in files]
