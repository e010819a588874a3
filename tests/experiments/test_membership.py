"""Changes of membership against other ways to compute them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score
from statsmodels.stats.weightstats import DescrStatsW

from chai_eval.data.text import cut, open_text
from chai_eval.experiments.membership import moved, rand
from chai_eval.models import load_model
from tests.experiments.conftest import Do, Path

CLUSTERS = [8, 5, 3, 3]  # of conf/model/tiny_llama_random.yaml
SAMPLES, TOKENS, LONGEST = 4, 12, 8


def moved_by_hand(one: list[int], other: list[int]) -> float:
    """The fewest heads that change, over all ways to give the clusters of the second the names of the first."""
    names, others = sorted(set(one)), sorted(set(other))
    width = max(len(names), len(others))
    names += [-1 - at for at in range(width - len(names))]
    best = min(
        sum(renamed.get(b) != a for a, b in zip(one, other, strict=True))
        for renamed in (dict(zip(others, order, strict=False)) for order in permutations(names))
    )
    return best / len(one)


def test_heads_that_moved_are_the_fewest_over_all_matchings_of_clusters() -> None:
    drawn = np.random.default_rng(0)
    for _ in range(200):
        one, other = (drawn.integers(0, 4, 7).tolist() for _ in range(2))
        assert moved(tuple(one), tuple(other)) == pytest.approx(moved_by_hand(one, other))
        assert rand(tuple(one), tuple(other)) == pytest.approx(adjusted_rand_score(one, other))


def test_a_cluster_that_loses_its_lowest_head_is_still_the_same() -> None:
    assert moved((0, 0, 0, 3), (0, 1, 1, 0)) == 0.25


def partition(probabilities: np.ndarray, probe: int, clusters: int) -> list[int]:
    """The clusters of heads by the first tokens, by scipy and scikit-learn."""
    seen = probabilities[:, :probe, :probe]
    features = np.stack([each[np.tril_indices(probe)] for each in seen])
    distance = squareform(pdist(features.astype(float), "cosine"))
    found = AgglomerativeClustering(clusters, metric="precomputed", linkage="average").fit_predict(distance)
    return found.tolist()


def test_an_experiment_has_what_scikit_learn_finds_in_the_stock_models_attention(do: Do, prepared: Path) -> None:
    text = prepared / "text.txt"
    asked = (f"samples={SAMPLES}", f"tokens={TOKENS}", f"longest_probe={LONGEST}", f"text={text}")
    folder = do("membership_changes", *asked)
    frame = pd.read_csv(folder / "data.csv", dtype={"layer": str}).set_index(["layer", "probe_tokens"])
    assert frame["quick"].all()

    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    model.set_attn_implementation("eager")
    stream = cut(open_text(str(text), 1234).documents, tokenizer, TOKENS)
    tokens = torch.stack([next(stream) for _ in range(SAMPLES)])
    with torch.no_grad():
        attention = model(tokens, output_attentions=True).attentions
    together = {"moved_previous": [], "rand_longest": []}
    for layer, clusters in list(enumerate(CLUSTERS))[1:]:
        found = [
            [partition(each, probe, clusters) for probe in range(2, LONGEST + 1)] for each in attention[layer].numpy()
        ]
        for at in range(1, LONGEST - 1):  # by one token every head attends to it alone: all ties
            own = frame.loc[str(layer), at + 2]
            previous = [moved_by_hand(each[at], each[at - 1]) for each in found]
            longest = [adjusted_rand_score(each[at], each[-1]) for each in found]
            for name, values in (("moved_previous", previous), ("rand_longest", longest)):
                assert own[name] == pytest.approx(np.mean(values), abs=1e-5)
                if np.ptp(values):
                    low, high = DescrStatsW(values).tconfint_mean()
                    assert own[[f"{name}_low", f"{name}_high"]].tolist() == pytest.approx([low, high], abs=1e-5)
                together[name].append(values)
    assert set(frame.index.get_level_values(0)) == {"1", "2", "3", "all"}
    for name, values in together.items():
        by_layer = np.mean(np.reshape(values, (3, -1)), axis=1)
        own = frame.loc["all"].loc[3:][name]
        assert own.mean() == pytest.approx(by_layer.mean(), abs=1e-5)
