from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from chai_eval.analyse import analyse, main
from chai_eval.attention.membership import membership_of
from chai_eval.attention.probe import probe_features
from chai_eval.calibration.analysis import cluster_table, correlation_and_error, follow_membership
from chai_eval.calibration.settings import AnalysisSettings
from chai_eval.calibration.sums import ErrorCurves
from chai_eval.cli.overrides import composed
from chai_eval.errors import SettingError
from chai_eval.schema import read
from tests.attention.tiny import HEADS, LAYERS, llama, looped, requests


def attention_of(model, ids: torch.Tensor) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    seen: list[np.ndarray] = []

    def layer_output(layer, probabilities, scores, values):  # type: ignore[no-untyped-def]
        seen.append(probabilities)
        return np.stack([p @ v for p, v in zip(probabilities, values, strict=True)])

    with looped(model, layer_output), torch.no_grad():
        model.base_model(input_ids=ids[None], use_cache=False)
    return seen


def test_correlation_equals_numpys() -> None:
    model, tokens = llama(), torch.stack(requests([12, 12, 12]))
    curves = ErrorCurves("last_row", "kmeans", starts=2)
    correlation, _ = correlation_and_error(model, tokens.split(2), curves, probe_tokens=5, seed=0)
    each = [attention_of(model, ids) for ids in tokens]
    for layer in range(LAYERS):
        expected = np.mean([np.corrcoef(seen[layer][:, -1]) for seen in each], axis=0)
        np.testing.assert_allclose(correlation[layer].numpy(), expected, atol=1e-5)


def test_membership_is_followed_probe_by_probe() -> None:
    model, tokens = llama(), torch.stack(requests([12, 12]))
    found = follow_membership(model, [tokens], [3] * LAYERS, longest=8)
    for row, ids in enumerate(tokens):
        seen = attention_of(model, ids)
        for layer in range(LAYERS):
            for probe in range(1, 9):
                block = torch.from_numpy(seen[layer][None, :, :probe, :probe])
                expected = membership_of(probe_features(block), 3)
                lowest = expected.representative.gather(1, expected.cluster)[0]
                assert torch.equal(found[layer][row, probe - 1], lowest)


def test_clusters_of_a_prompt_have_each_head_once_below_their_lowest() -> None:
    model, tokens = llama(), torch.stack(requests([12, 12]))
    found = follow_membership(model, [tokens], [3] * LAYERS, longest=8)
    table = cluster_table(found, probe_tokens=5)
    assert table["clusters"].tolist() == [3] * LAYERS
    for layer, text in zip(table["layer"], table["heads"], strict=True):
        heads = [tuple(map(int, each.split())) for each in text.split(" · ")]
        assert sorted(head for each in heads for head in each) == list(range(HEADS))
        assert heads == sorted(heads)
        block = torch.from_numpy(attention_of(model, tokens[0])[layer][None, :, :5, :5])
        labels = membership_of(probe_features(block), 3).cluster[0]
        assert set(heads) == {tuple(torch.nonzero(labels == cluster).flatten().tolist()) for cluster in labels.unique()}


def small_asked(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("some words that mean little, again and again\n" * 40)
    few = ("samples=3", "tokens=24", "longest_probe=8", "starts=2", f"text={text}", f"out={tmp_path / 'a'}")
    return ["model=tiny_llama_random", "counts=[3,3,8,5]", *few]


def test_without_matplotlib_data_is_written_and_a_line_says_how_to_get_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chai_eval.calibration.figures.importlib.util.find_spec", lambda _: None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "error_curves.png").write_bytes(b"of earlier data")
    folder = analyse(read(AnalysisSettings, composed("analyse", small_asked(tmp_path))), "command")
    assert len(list(folder.glob("*.parquet"))) == 4
    assert list(folder.glob("*.png")) == []
    main(read(AnalysisSettings, composed("analyse", small_asked(tmp_path))), "command")
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "No figures, for want of matplotlib: pip install -c constraints.txt -e '.[figures]'"
    with pytest.raises(SettingError, match=r"^figures: true given.*; allowed: false, null, or pip install .*figures"):
        analyse(read(AnalysisSettings, composed("analyse", [*small_asked(tmp_path), "figures=true"])), "command")


def test_data_and_figures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = analyse(read(AnalysisSettings, composed("analyse", small_asked(tmp_path))), "command")
    tables = {path.stem: pd.read_parquet(path) for path in folder.glob("*.parquet")}
    assert set(tables) == {"head_correlation", "error_curves", "membership_changes", "cluster_sizes"}
    assert all((folder / f"{name}.png").stat().st_size > 1000 for name in tables)
    errors = tables["error_curves"]
    assert (errors.groupby("layer")["is_elbow"].sum() == 1).all()
    assert (errors[errors["clusters"] == HEADS]["error"] == 0).all()
    # Whatever the clusters, together they hold every head; a layer with all heads can't change.
    np.testing.assert_allclose(tables["cluster_sizes"].groupby("layer")["size"].sum(), HEADS)
    assert set(tables["membership_changes"]["layer"]) == {0, 1, 3}
    last = tables["membership_changes"].query("probe_tokens == 8")
    assert (last["unlike_longest"] == 0).all()
    assert json.loads((folder / "analysis.json").read_text())["clusters"] == [3, 3, 8, 5]
