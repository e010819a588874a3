from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics.pairwise import cosine_distances

from chai_eval.analyse import analyse, main
from chai_eval.attention.membership import membership_of
from chai_eval.attention.probe import probe_features
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration.analysis import cluster_table, correlation_and_error, follow_membership
from chai_eval.calibration.drift import EVERY_LAYER, drift_table, follow_windows, window_ends
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


def clusters_of(rows: np.ndarray, count: int) -> np.ndarray:
    """Scikit-learn's average linkage of heads `[heads, n]` by their cosine distances."""
    linkage = AgglomerativeClustering(n_clusters=count, metric="precomputed", linkage="average")
    return linkage.fit_predict(cosine_distances(rows))


def rand_index(one: np.ndarray, other: np.ndarray) -> float:
    """Adjusted for chance, by counting pairs of heads."""
    counted = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
    for first, second in itertools.combinations(range(len(one)), 2):
        counted[bool(one[first] == one[second]), bool(other[first] == other[second])] += 1
    (both, only_one), (only_other, neither) = ((counted[same, True], counted[same, False]) for same in (True, False))
    apart = (both + only_one) * (only_one + neither) + (both + only_other) * (only_other + neither)
    return 1.0 if apart == 0 else 2 * (both * neither - only_one * only_other) / apart


def test_agreement_of_later_windows_equals_that_of_pairs_of_heads_clustered_one_window_at_a_time() -> None:
    model, tokens, counts, probe, window = llama(), torch.stack(requests([40, 40, 40])), [3, HEADS, 4], 5, 4
    ends = window_ends(40, probe, window)
    assert ends == [16, 32, 40]
    followed = follow_windows(model, tokens.split(2), counts, probe, window, ends)
    table = drift_table(followed, counts, ends, attention_shape(model)).set_index(["layer", "against", "end"])
    each = [attention_of(model, ids) for ids in tokens]
    by_text: dict[tuple[str, int], list[list[float]]] = {}
    for layer in (0, 2):
        for end in ends:
            found: dict[str, list[float]] = {"probe": [], "before": []}
            for seen in each:
                first = clusters_of(seen[layer][:, :probe, :probe].reshape(HEADS, -1), counts[layer])
                here, before = (
                    clusters_of(seen[layer][:, last - window : last].reshape(HEADS, -1), counts[layer])
                    for last in (end, end - window)
                )
                found["probe"].append(rand_index(first, here))
                found["before"].append(rand_index(before, here))
            for against, expected in found.items():
                assert table.loc[(layer, against, end), "agreement"] == pytest.approx(np.mean(expected))
                by_text.setdefault((against, end), []).append(expected)
    for (against, end), values in by_text.items():
        line, over_layers = table.loc[(EVERY_LAYER, against, end)], np.mean(values, axis=0)
        low, high = stats.t.interval(0.95, 2, over_layers.mean(), stats.sem(over_layers))
        assert line[["agreement", "low", "high"]].tolist() == pytest.approx(
            [over_layers.mean(), max(low, -1), min(high, 1)]
        )
    assert 1 not in table.index.get_level_values("layer")


def test_drift_is_written_where_it_is_asked_for_and_nothing_of_it_is_left_otherwise(tmp_path: Path) -> None:
    asked = [*small_asked(tmp_path), "figures=false"]
    folder = analyse(read(AnalysisSettings, composed("analyse", [*asked, "drift=true"])), "command")
    table = pd.read_parquet(folder / "cluster_drift.parquet")
    assert set(table["end"]) == {16, 24}
    assert set(table["layer"]) == {EVERY_LAYER, 0, 1, 3}
    described = json.loads((folder / "analysis.json").read_text())["drift"]
    assert [each["agreement"] for each in described] == table.query("layer == -1")["agreement"].tolist()
    analyse(read(AnalysisSettings, composed("analyse", asked)), "command")
    assert not list(folder.glob("cluster_drift.*"))
    with pytest.raises(SettingError, match=r"^window: 10 given with tokens=24 and probe_tokens=5; allowed: 1 to 9$"):
        analyse(read(AnalysisSettings, composed("analyse", [*asked, "drift=true", "window=10"])), "command")
