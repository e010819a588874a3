"""The frontier of a tiny random model: its table, who is best, and that a killed one ends with the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.stats import ttest_rel

from chai_eval.calibrate import calibrate
from chai_eval.cli.overrides import composed
from chai_eval.errors import SettingError
from chai_eval.frontier import command
from chai_eval.frontier.points import best_at
from chai_eval.frontier.settings import FrontierSettings
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.schema import read
from chai_eval.scoring.fidelity import fidelities
from chai_eval.scoring.runner import Runner
from tests.calibration.test_calibrate import settings as calibrating
from tests.calibration.test_calibrate import text

__all__ = ["text"]


@pytest.fixture
def calibrated(text: str, tmp_path: Path) -> str:
    return str(calibrate(calibrating(text, tmp_path / "calibrated"), "command"))


def settings(text: str, calibrated: str, out: Path, *changes: str) -> FrontierSettings:
    few = ("tokens=24", "sequences=6", "saving=[0.14,0.25]", "figures=true")
    given = ["model=tiny_llama_random", f"text={text}", f"calibrated={calibrated}", f"out={out}", *few, *changes]
    return read(FrontierSettings, composed("frontier", given))


def test_a_frontier_has_every_method_that_saves_and_says_which_is_best(
    text: str, calibrated: str, tmp_path: Path
) -> None:
    folder = command.frontier(settings(text, calibrated, tmp_path / "f"), "python -m chai_eval frontier …")
    frame = pd.read_csv(folder / "frontier.csv")
    assert {"chai", "chai_static", "output_aware", "v_reuse", "kv_rank"} <= set(frame["method"])
    found = frame[frame["method"] == "kv_rank"]
    assert (found["held"] <= [0.86, 0.75]).all()
    # The same method on the same text by the library's other way.
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    method = build_method("kv_rank", moments=calibrated, saving=0.25, context=24)
    documents = [each.replace("\n", " ") for each in Path(text).read_text().split("\n\n")]
    assert len(documents) == 30
    own = command.open_text(text, 1234)
    alone = fidelities(Runner(model, tokenizer), {"": method}, own.documents, tokens=24, sequences=6)[""]
    assert found["kl"].iloc[1] == pytest.approx(alone.divergence.value, rel=1e-4)
    assert found["kl_high"].iloc[1] == pytest.approx(alone.divergence.high, rel=1e-4)
    by_bin = pd.read_csv(folder / "positions.csv")
    assert (by_bin.groupby("point")["tokens"].sum() == frame.set_index("point")["tokens"]).all()
    of_point = by_bin[by_bin["point"] == found["point"].iloc[1]].drop(columns=["method", "point"])
    pd.testing.assert_frame_equal(of_point.reset_index(drop=True), alone.positions, rtol=1e-4)
    assert "python -m chai_eval frontier" in (folder / "positions.svg").read_text()
    for each in frame.to_dict("records"):  # dominated, by going over all pairs
        better = [
            other
            for other in frame.to_dict("records")
            if all(other[of] <= each[of] for of in ("held", "read", "kl"))
            and any(other[of] < each[of] for of in ("held", "read", "kl"))
        ]
        assert each["dominated"] == bool(better)
    said = json.loads((folder / "frontier.json").read_text())["best"]
    assert said[0].startswith("10 % of the bytes held saved: ")
    assert (folder / "frontier.svg").stat().st_size > 1000
    assert "python -m chai_eval frontier" in (folder / "frontier.svg").read_text()


def test_a_frontier_that_was_killed_goes_on_to_the_same_files(
    text: str, calibrated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "most_tokens", lambda model, size: 48)  # two sequences at a time
    whole = command.frontier(settings(text, calibrated, tmp_path / "whole"), "command")
    real, calls = command.compare, []

    def killed(*given: object) -> object:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "compare", killed)
    again = settings(text, calibrated, tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        command.frontier(again, "command")
    assert not (tmp_path / "again" / "frontier.csv").exists()
    folder = command.frontier(again, "command")
    assert len(calls) == 4  # the first part was not compared anew
    figures = ("frontier.svg", "frontier.png", "positions.svg", "positions.png")
    for name in ("frontier.csv", "frontier.md", "samples.parquet", "positions.csv", *figures):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def frame_of(**kl: list[float]) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    rows = {name: pd.DataFrame({"divergence": each}) for name, each in kl.items()}
    points = [
        {"method": name, "point": name, "held": 0.8, "read": 0.8, "kl": float(each["divergence"].mean())}
        for name, each in rows.items()
    ]
    return pd.DataFrame(points), rows


def test_what_intervals_cannot_tell_is_said_and_the_interval_is_that_of_scipys_paired_test() -> None:
    generator = torch.Generator().manual_seed(0)
    text_of = torch.rand(40, generator=generator) * 2  # sequences differ more than methods do
    one = (text_of + 0.1).tolist()
    better = (text_of + 0.05 * torch.rand(40, generator=generator)).tolist()
    near = (text_of + 0.1 + torch.randn(40, generator=generator) * 0.3).tolist()
    frame, rows = frame_of(one=one, better=better)
    low, high = ttest_rel(one, better).confidence_interval()
    assert best_at(frame, rows, 0.2) == (
        f"20 % of the bytes held saved: better (KL {frame['kl'][1]:.3f}); next one (KL {frame['kl'][0]:.3f}), "
        f"{low:.3f} to {high:.3f} more"
    )
    assert best_at(frame, rows, 0.3) is None
    assert "can't be told" in str(best_at(*frame_of(one=one, near=near), 0.1))
    assert str(best_at(*frame_of(one=one), 0.1)).endswith("the only one that saves so much")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("methods=[nothing]", "methods: 'nothing' given; allowed: mha, chai"),
        ("methods=[mha]", "methods: mha given, which saves no share of the cache"),
        ("saving=[1.5]", "saving: [1.5] given; allowed: numbers between 0 and 1"),
        ("calibrated=nowhere", "method.clusters: no calibration 'nowhere'"),
    ],
)
def test_bad_input_is_one_line(change: str, line: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as raised:
        command.frontier(settings(text, "smollm2_mha", tmp_path / "f", change), "command")
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
