"""What is read from a model, held against loops over heads and queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_distances

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration.observe import observe
from chai_eval.calibration.output_projection import output_factors
from chai_eval.calibration.predictor import HeadOutputs
from chai_eval.calibration.sums import BatchStatistics
from tests.attention.tiny import LAYERS, MODELS, looped, requests

LENGTH, PROBE = 14, 5


@pytest.mark.parametrize("kind", list(MODELS))
def test_costs_and_distances_equal_loops(kind: str) -> None:
    model = MODELS[kind]()
    tokens = torch.stack(requests([LENGTH, LENGTH]))
    queries = torch.tensor([3, 7, 12])
    statistics, outputs = BatchStatistics(output_factors(model), queries, PROBE), HeadOutputs(torch.arange(LENGTH))
    observe(model, [tokens], [statistics, outputs])
    names = ("output_cost", "importance", "distance_last_row", "distance_probe")
    seen = {name: statistics.stacked(name) for name in names}
    head_norms = outputs.norms().unflatten(1, (len(tokens), LENGTH))
    for row, each in enumerate(tokens):
        captured: list[tuple[np.ndarray, np.ndarray]] = []

        def layer_output(layer, probabilities, scores, values, into=captured):  # type: ignore[no-untyped-def]
            into.append((probabilities, values))
            return np.stack([p @ v for p, v in zip(probabilities, values, strict=True)])

        with looped(model, layer_output), torch.no_grad():
            model.base_model(input_ids=each[None], use_cache=False)
        for layer in range(LAYERS):
            probabilities, values = captured[layer]
            cost, importance = loop_costs(probabilities, values, output_slices(model, layer), queries.tolist())
            # float32 scores and sums of squares: five digits.
            np.testing.assert_allclose(seen["output_cost"][layer, row], cost, rtol=1e-3, atol=1e-5 * cost.max())
            np.testing.assert_allclose(seen["importance"][layer, row], importance, rtol=1e-3)
            last = probabilities[:, -1]
            np.testing.assert_allclose(seen["distance_last_row"][layer, row], cosine_distances(last), atol=1e-5)
            rows, columns = np.tril_indices(PROBE)
            block = probabilities[:, rows, columns]
            np.testing.assert_allclose(seen["distance_probe"][layer, row], cosine_distances(block), atol=1e-5)
            norms = np.stack([np.linalg.norm(p @ v, axis=-1) for p, v in zip(probabilities, values, strict=True)])
            np.testing.assert_allclose(head_norms[layer, row], norms.T, rtol=1e-3, atol=1e-5)


def output_slices(model, layer: int) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    """`[hidden, head_dim]` of each head."""
    names = {"llama": "layers.{}.self_attn.o_proj", "opt": "decoder.layers.{}.self_attn.out_proj"}
    path = names.get(model.config.model_type, "layers.{}.attention.dense").format(layer)
    weight = model.base_model.get_submodule(path).weight.detach().double().numpy()
    return np.split(weight, attention_shape(model).heads, axis=1)


def loop_costs(
    probabilities: np.ndarray, values: np.ndarray, slices: list[np.ndarray], queries: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    heads = len(probabilities)
    cost, importance = np.zeros((heads, heads)), np.zeros(heads)
    for query in queries:
        for i in range(heads):
            own = slices[i] @ (probabilities[i, query] @ values[i])
            importance[i] += own @ own / len(queries)
            for r in range(heads):
                change = own - slices[i] @ (probabilities[r, query] @ values[i])
                cost[i, r] += change @ change / len(queries)
    return cost, importance
