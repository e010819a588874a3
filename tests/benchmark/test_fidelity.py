"""The comparison of methods at one saving, on a calibration of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chai_eval.benchmark import fidelity
from chai_eval.calibrate import calibrate
from chai_eval.calibration.settings import CalibrationSettings
from chai_eval.cli.overrides import composed
from chai_eval.schema import read

WORDS = "the cat sat on a mat while rain fell over hills and old men told tales of ships"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a text, and a calibration made of it."""
    made = tmp_path_factory.mktemp("fidelity")
    text = made / "my text.txt"
    text.write_text("\n\n".join(WORDS[start:] for start in range(30)))
    few = ("samples=6", "tokens=32", "batch_tokens=64", "starts=2", "sensitivity_samples=2", "predictor=false")
    values = composed("calibrate", ["model=tiny_llama_random", f"text='{text}'", f"out={made / 'calibration'}", *few])
    calibrate(read(CalibrationSettings, values), "command")
    return made


def compared(folder: Path, *given: str) -> tuple[dict[str, fidelity.Fidelity], list[Path]]:
    """What it returns, and the records that stand there then."""
    always = ["--model", "tiny_llama_random", "--calibration", str(folder / "calibration"), "--tokens", "32"]
    found = fidelity.main([*always, "--text", str(folder / "my text.txt"), "--out", str(folder / "out"), *given])
    return found, sorted((folder / "out").iterdir())


def test_of_one_sequence_the_record_has_means_without_intervals(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, (path,) = compared(folder, "--sequences", "1")
    record = json.loads(path.read_text())
    assert list(record["methods"]) == list(found)
    for name, method in record["methods"].items():
        assert method["divergence"] == {"value": found[name].divergence.value, "low": None, "high": None}
        assert method["sequences"] == 1
        assert len(method["per_sequence"]) == 1
    assert "nan" not in capsys.readouterr().out


def test_records_of_another_preset_and_text_stand_beside_each_other(folder: Path) -> None:
    compared(folder, "--sequences", "1")
    other = folder / "other.txt"
    other.write_text(WORDS[::-1] * 3)
    compared(folder, "--sequences", "1", "--text", str(other))
    _, paths = compared(folder, "--sequences", "2", "--preset", "aggressive")
    assert [path.name for path in paths] == [
        "tiny_llama_random-aggressive-my-text.txt.json",
        "tiny_llama_random-balanced-my-text.txt.json",
        "tiny_llama_random-balanced-other.txt.json",
    ]
    record = json.loads(paths[0].read_text())
    assert record["preset"] == "aggressive"
    assert record["methods"]["v_reuse, budget counts"]["divergence"]["low"] is not None


def test_elbow_rows_follow_the_error_curves_of_the_calibration_that_has_some(folder: Path) -> None:
    few = ("samples=6", "tokens=32", "batch_tokens=64", "starts=2", "sensitivity_samples=2", "predictor=false")
    given = [f"text='{folder / 'my text.txt'}'", f"out={folder / 'elbow'}", "rule=elbow", *few]
    calibrate(read(CalibrationSettings, composed("calibrate", ["model=tiny_llama_random", *given])), "command")
    without, _ = compared(folder, "--sequences", "1")
    found, _ = compared(folder, "--sequences", "1", "--elbows", str(folder / "elbow"))
    assert found.keys() - without.keys() == {"chai, elbow counts", "output_aware, chai's elbow counts"}
    assert all(found[name].divergence.value == each.divergence.value for name, each in without.items())


@pytest.mark.parametrize("option", ["--tokens", "--sequences"])
@pytest.mark.parametrize("given", ["0", "-3", "half"])
def test_numbers_that_compare_nothing_are_refused(option: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fidelity.main(["--text", "passages", option, given])
    assert f"argument {option}: " in capsys.readouterr().err
