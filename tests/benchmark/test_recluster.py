"""The benchmark of moving heads between clusters, on a tiny model: its bounds against loops, its record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics.pairwise import cosine_distances

from chai_eval.benchmark import recluster
from tests.attention.tiny import MODELS, HeadLoop, looped_logits, masked_logits, padded, requests
from tests.methods.cases.ours import COUNTS
from tests.methods.loops import every_head
from tests.methods.test_against_loops import assert_same


def anew_loop(every: int, window: int, probe: int = 5) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out, (heads, n, _) = every_head(probabilities, values), probabilities.shape
        for token in range(probe, n):
            start = token // every * every
            if window == 0:
                seen = probabilities[:, max(start, probe) : start + every]
            else:
                seen = probabilities[:, start - window : start] if start else probabilities[:, :probe]
            apart = cosine_distances(seen.reshape(heads, -1))
            linkage = AgglomerativeClustering(COUNTS[layer], metric="precomputed", linkage="average")
            labels = linkage.fit_predict(apart).tolist()
            for head in range(heads):
                out[head, token] = probabilities[labels.index(labels[head]), token] @ values[head]
        return out if n > probe else every_head(probabilities, values)

    return layer_output


@pytest.mark.parametrize("window", [4, 0])
def test_bounds_equal_loops_that_cluster_anew_from_whole_rows(window: int) -> None:
    model, tokens = MODELS["llama"](), requests([40])
    expected = looped_logits(model, tokens, anew_loop(every=12, window=window))
    with recluster.FoundAnew(clusters=COUNTS, every=12, window=window).applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), expected)


def test_the_record_has_what_each_loses_more_than_chai_and_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "\n\n".join("the cat sat on a mat while rain fell over hills and old men told"[at:] * 9 for at in range(9))
    )
    for name, value in {"PROMPT": 40, "DECODED": 3, "REPETITIONS": 1}.items():
        monkeypatch.setattr(recluster, name, value)
    asked = ["--model", "tiny_llama_random", "--text", str(text), "--tokens", "40", "--sequences", "4", "--every", "16"]
    found = recluster.main([*asked, "--thresholds", "[0,2]", "--out", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out" / "tiny_llama_random-40-text.txt.json").read_text())
    assert list(found) == list(record["methods"])
    chai, guarded, far = (record["methods"][name] for name in list(found)[:3])
    low, high = ttest_rel(guarded["per_sequence"], chai["per_sequence"]).confidence_interval()
    assert [guarded["more_than_chai"][end] for end in ("low", "high")] == pytest.approx([low, high], abs=1e-5)
    # Until the first 16 tokens have been read no head has moved, and by no more than 2 none is ever apart.
    assert guarded["positions"][1]["kl"] == pytest.approx(chai["positions"][1]["kl"], abs=1e-5)
    assert far["per_sequence"] == pytest.approx(chai["per_sequence"], abs=1e-5)
    costs = record["costs"]
    assert costs["chai"]["bytes by formula"] < costs[list(costs)[1]]["bytes by formula"]
    assert all(each["bytes by formula"] <= each["bytes allocated"] for each in costs.values())
