"""Clusters within each device's heads: how many, which by a calibration, what they hold, and what can't be split."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.cluster import AgglomerativeClustering

from chai_eval.attention import Shard
from chai_eval.attention.shape import attention_shape
from chai_eval.errors import SettingError
from chai_eval.methods import METHODS, build_method
from chai_eval.methods.blocks import shared_out
from tests.attention.tiny import HEADS, LAYERS, MODELS, HeadLoop, chai_loop, looped_logits, masked_logits, padded
from tests.attention.tiny import requests as texts
from tests.methods.calibrations import write_calibration
from tests.methods.cases import NOTHING
from tests.methods.cases.case import build
from tests.methods.loops import served_loop
from tests.methods.test_against_loops import assert_same

SPLIT = {"mha", "chai", "v_reuse", "chai_static", "output_aware"}


@pytest.mark.parametrize("heads", [[4, 4], [3, 3, 3], [5, 4], [3, 2, 2, 2], [8], [1] * 5])
def test_clusters_are_shared_out_in_proportion_one_at_least_and_evenly_over_the_layers(heads: list[int]) -> None:
    total = sum(heads)
    for clusters in range(1, total + 1):
        of_layers = [shared_out(clusters, heads, layer) for layer in range(len(heads))]
        for found in of_layers:
            assert sum(found) == max(clusters, len(heads))
            assert all(1 <= given <= own for given, own in zip(found, heads, strict=True))
            if clusters >= len(heads):
                fair = [max(1.0, clusters * own / total) for own in heads]
                assert all(abs(given - share) < 1 for given, share in zip(found, fair, strict=True))
        if len(set(heads)) == 1:  # what doesn't divide goes round
            assert len({sum(given) for given in zip(*of_layers, strict=True)}) == 1


def cut_loop(loops: list[HeadLoop], at: list[int]) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        parts = [np.split(each, at) for each in (probabilities, scores, values)]
        return np.concatenate([loop(layer, *part) for loop, *part in zip(loops, *parts, strict=True)])

    return layer_output


def test_heads_that_devices_do_not_divide_are_split_as_evenly_as_can_be() -> None:
    """Eight heads on three devices are three, three and two; of four clusters the third layer's turn is device 2's."""
    model, tokens = MODELS["llama"](), texts([3, 12, 40])
    method = build_method("chai", clusters=[8, 5, 4], tensor_parallel=3)
    expected = looped_logits(
        model, tokens, cut_loop([chai_loop([3, 2, 2]), chai_loop([3, 2, 1]), chai_loop([2, 1, 1])], [3, 6])
    )
    with method.applied(model), torch.no_grad():
        assert_same(masked_logits(model, *padded(tokens, "left")), expected)
        cache = model(input_ids=torch.stack(texts([40])), use_cache=True).cache
    held = [layer.keys.shape[1] for layer in cache.layers]
    assert held == [each.keys for each in method.footprint(model)] == [8, 5, 4]


@pytest.mark.parametrize("name", ["llama", "llama_gqa"])
def test_a_calibrations_clusters_are_found_anew_within_each_device(name: str, tmp_path: Path) -> None:
    model, draw = MODELS[name](), torch.Generator().manual_seed(1)
    apart = torch.rand(LAYERS, HEADS, HEADS, generator=draw, dtype=torch.float64)
    apart = (apart + apart.mT) * (1 - torch.eye(HEADS))
    cost = torch.rand(LAYERS, HEADS, HEADS, generator=draw, dtype=torch.float64) * (1 - torch.eye(HEADS))
    preset = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 4, 4, 6, 6], [0] * HEADS])  # 8, 4 and 1 clusters
    tensors = {"static_membership.balanced": preset, "output_aware.balanced": preset.clone()}
    folder = write_calibration(
        tmp_path / "tiny", model, {**tensors, "distance.probe": apart, "output_cost": cost},
        provenance={"settings": {"features": "probe"}},
    )  # fmt: skip

    def of_devices(find: Callable[[torch.Tensor, int, int], list[int]], known: torch.Tensor) -> list[list[int]]:
        return [
            [*find(layer, 0, first), *find(layer, 4, second)]
            for layer, (first, second) in zip(known, [(4, 4), (2, 2), (1, 1)], strict=True)
        ]

    static, aware = of_devices(merged, apart), of_devices(cheapest, cost)
    tokens = texts([3, 17, 9], seed=4)
    for method, serving in (("chai_static", static), ("output_aware", aware)):
        built = build_method(method, membership=str(folder), tensor_parallel=2)
        with built.applied(model):
            assert_same(
                masked_logits(model, *padded(tokens, "left")), looped_logits(model, tokens, served_loop(serving))
            )


def merged(distance: torch.Tensor, start: int, count: int) -> list[int]:
    block = distance[start : start + 4, start : start + 4].numpy()
    labels = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit_predict(block).tolist()
    return [start + labels.index(label) for label in labels]


def cheapest(cost: torch.Tensor, start: int, count: int) -> list[int]:
    """Of every choice of so many representatives the one that costs least, each head served by the cheapest."""
    block = cost[start : start + 4, start : start + 4].numpy()
    best = min(itertools.combinations(range(4), count), key=lambda chosen: block[:, chosen].min(1).sum())
    return [start + best[int(block[head, best].argmin())] for head in range(4)]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_looks_at_all_heads_together_is_refused_for_a_model_that_is_split(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["llama"]()
    built = build(method, NOTHING[method], model)
    for place in ("base", "blocks", "clustering"):
        monkeypatch.setattr(f"chai_eval.methods.{place}.shard", lambda model: Shard(1, 2))
    if method in SPLIT:
        built.check_settings(model)
        return
    with pytest.raises(
        SettingError, match=rf"method: {method} given for a model that is split over 2 .*; allowed: mha"
    ):
        built.check_settings(model)


def test_a_device_has_the_plan_of_its_own_heads_and_results_are_named_by_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, chai = MODELS["llama_gqa"](), build_method("chai", clusters=[8, 5, 1])
    assert chai.for_model(model).settings() == chai.settings()
    for place in ("base", "blocks", "clustering"):
        monkeypatch.setattr(f"chai_eval.methods.{place}.shard", lambda model: Shard(1, 2))
    assert {layer: plan.clusters for layer, plan in chai.hooks(model).plans.items()} == {1: 3, 2: 1}
    assert chai.for_model(model).settings() == build_method("chai", clusters=[8, 5, 1], tensor_parallel=2).settings()
    with_dejavu = build_method("chai", clusters=[8, 5, 1], **{"with": ["dejavu"]})
    with pytest.raises(SettingError, match=r"method: chai\+dejavu given for a model that is split over 2"):
        with_dejavu.check_settings(model)
    with pytest.raises(
        SettingError, match="method.tensor_parallel: 4 given for a model that is split over 2; allowed: 2"
    ):
        build_method("chai", clusters=[8, 5, 1], tensor_parallel=4).check_settings(MODELS["llama"]())
    # Costs are those of all devices together.
    assert [each.keys for each in chai.footprint(model)] == [attention_shape(model).kv_heads] * LAYERS
