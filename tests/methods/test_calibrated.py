"""Calibrations: found by name or path, refused for another model, and read to what they say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chai_eval import calibration_file
from chai_eval.calibration_file import calibrated_presets, calibration
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.methods.clusters import preset_runs
from chai_eval.models.fingerprint import identity
from chai_eval.resources import conf_dir
from tests.attention.tiny import HEADS, LAYERS, MODELS, llama, looped_logits, masked_logits, padded, requests
from tests.methods.calibrations import random_predictors, write_calibration
from tests.methods.cases.ours import LOWEST, SERVING
from tests.methods.loops import head_prune_loop, served_loop
from tests.methods.test_against_loops import assert_same

# 24 heads; the seven lowest importances are those of heads 3 and 5 of each layer, then head 0 of layer 1.
IMPORTANCE = torch.arange(24.0).view(LAYERS, HEADS) + 10
IMPORTANCE[:, 3], IMPORTANCE[:, 5], IMPORTANCE[1, 0] = 1, 2, 3
TENSORS = {
    "static_membership.balanced": torch.tensor(LOWEST),
    "output_aware.aggressive": torch.tensor(SERVING),
    "head_importance": IMPORTANCE,
}


@pytest.mark.parametrize(
    ("method", "settings", "loop"),
    [
        ("chai_static", {"membership": "{}"}, served_loop(LOWEST)),
        ("output_aware", {"membership": "{}", "preset": "aggressive"}, served_loop(SERVING)),
        ("head_prune", {"importance": "{}", "sparsity": 0.3}, head_prune_loop([[3, 5], [3, 5, 0], [3, 5]])),
    ],
)
def test_a_method_does_what_its_calibration_says(method: str, settings: dict, loop: Any, tmp_path: Path) -> None:
    model = MODELS["llama_gqa"]()
    folder = write_calibration(tmp_path / "tiny", model, TENSORS)
    given = {name: value.format(folder) if isinstance(value, str) else value for name, value in settings.items()}
    tokens = requests([3, 17, 9], seed=4)
    built = build_method(method, **given)
    built.check(model)
    with built.applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), looped_logits(model, tokens, loop))


def test_settings_tell_calibrations_apart_by_what_is_in_them_not_where_they_lie(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    one = write_calibration(tmp_path / "one", model, TENSORS)
    same = write_calibration(tmp_path / "same", model, TENSORS)
    other = write_calibration(tmp_path / "other", model, TENSORS | {"head_importance": IMPORTANCE + 1})
    settings = [build_method("head_prune", importance=str(each)).settings() for each in (one, same, other)]
    assert settings[0] == settings[1] != settings[2]
    json.dumps(settings)


def test_a_calibration_is_found_by_the_name_of_its_model_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path))
    folder = write_calibration(tmp_path / "calibration" / "tiny", MODELS["llama"](), TENSORS)
    assert calibration("tiny").folder == folder
    assert calibration(str(folder / "calibration.json")).folder == folder


@pytest.mark.parametrize(
    ("made_for", "line"),
    [
        (lambda: llama(kv_heads=2), r"was made for tiny \(kv_heads 2.*the model is llama \(kv_heads 8"),
        (MODELS["opt"], r"was made for tiny \(model_type opt.*the model is llama \(model_type llama"),
        (lambda: llama(seed=1), r"was made for tiny \(signs .*the model is llama \(signs "),
    ],
)
def test_a_calibration_of_another_model_is_refused_naming_both(made_for: Any, line: str, tmp_path: Path) -> None:
    folder = write_calibration(tmp_path, made_for(), TENSORS | random_predictors())
    for method in (
        build_method("chai_static", membership=str(folder)),
        build_method("head_prune", importance=str(folder)),
        build_method("dejavu", selector="predictor", predictor=str(folder)),
    ):
        with pytest.raises(SettingError, match=line) as error:
            method.check(MODELS["llama"]())
        assert str(error.value).startswith("method.")
        assert "\n" not in str(error.value)


def test_a_calibration_fits_its_model_in_any_precision(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path, MODELS["llama"](), TENSORS)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        calibration(str(folder)).check(MODELS["llama"]().to(dtype))


def test_what_a_calibration_lacks_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    folder = write_calibration(tmp_path, model, TENSORS)
    for method, lacking in (
        (build_method("dejavu", selector="predictor", predictor=str(folder)), "predictor.0.down"),
        (build_method("chai_static", membership=str(folder), preset="aggressive"), "static_membership.aggressive"),
    ):
        with pytest.raises(SettingError, match=rf"has no {lacking}; allowed: .*chai_eval.calibrate model=tiny"):
            method.check(model)


@pytest.mark.parametrize(
    ("content", "line"),
    [("{", "can't be read"), ("[]", "is no calibration of layout 1"), ('{"layout": 2}', "is no calibration")],
)
def test_a_broken_calibration_is_one_line(content: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(SettingError, match=rf"method.membership: .*{line}"):
        build_method("chai_static", membership=str(tmp_path))


def test_tensors_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path, MODELS["llama"](), TENSORS)
    (folder / "calibration.safetensors").write_bytes(b"nothing")
    with pytest.raises(SettingError, match=r"method.importance: .*safetensors can't be read"):
        build_method("head_prune", importance=str(folder)).check(MODELS["llama"]())


def written(folder: Path, clusters: list[list[int]] | None = None) -> Path:
    """A calibration as `python -m chai_eval calibrate` writes it."""
    described = {"layout": 1, "model": {"name": "tiny", **identity(MODELS["llama"]())}}
    calibration_file.write_calibration(folder, {**described, "presets": {"balanced": {"clusters": clusters}}}, TENSORS)
    return folder


def test_damaged_tensors_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    file = written(tmp_path) / "calibration.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # still the file of a calibration, with another number in it
    file.write_bytes(content)
    said = r"^method\.importance: .*calibration\.safetensors: not what was written: .*; allowed: .*chai_eval calibrate"
    with pytest.raises(SettingError, match=said):
        build_method("head_prune", importance=str(tmp_path)).settings()
    with pytest.raises(SettingError, match=said):
        build_method("head_prune", importance=str(tmp_path)).check(MODELS["llama"]())


def test_a_damaged_calibration_of_the_users_own_does_not_give_way_to_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path))
    shipped = preset_runs("smollm2-balanced")
    file = written(tmp_path / "calibration" / "smollm2", [[9, 17], [3, 13]]) / "calibration.json"
    assert preset_runs("smollm2-balanced") == [[9, 17], [3, 13]] != shipped
    file.write_text(file.read_text().replace("17", "16"))
    with pytest.raises(
        SettingError, match=r"^method\.clusters: .*calibration\.json: not what was written: .*; allowed: "
    ):
        preset_runs("smollm2-balanced")
    assert "smollm2_mha-balanced" in calibrated_presets()


@pytest.mark.parametrize("name", ["smollm2", "smollm2_mha"])
def test_shipped_calibrations_have_checksums_which_leave_their_name_in_results_alone(name: str, tmp_path: Path) -> None:
    folder = conf_dir() / "calibration" / name
    described = json.loads((folder / "calibration.json").read_text())
    tensors = (folder / "calibration.safetensors").read_bytes()
    assert described.pop("files") == {"calibration.safetensors": hashlib.sha256(tensors).hexdigest()}
    assert described.pop("checksum")
    # Of both files, as it was before they had any.
    both = [hashlib.sha256(each).digest() for each in (json.dumps(described, indent=1).encode() + b"\n", tensors)]
    assert calibration(str(folder)).sha256 == hashlib.sha256(b"".join(both)).hexdigest()
