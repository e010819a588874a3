"""Features of the embedded model: what K-Means finds on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from chai_eval.attention import AttentionCall, full_attention, take_over
from chai_eval.calibration.kmeans import error_curve, gram
from chai_eval.calibration.observe import probabilities_at
from chai_eval.models import load_model

STARTS = 40  # so many that neither misses the optimum by more than the tolerance


@pytest.mark.assets
def test_error_curves_of_real_attention_equal_scikit_learns_inertia() -> None:
    model, tokenizer = load_model("smollm2_mha", device="cpu", dtype="float32")
    text = "The harbour was quiet that morning. Two boats lay at anchor, and the men who owned them were asleep. " * 4
    ids = torch.tensor([tokenizer(text)["input_ids"][:64]])
    rows: list[torch.Tensor] = []

    def attend(call: AttentionCall, query, key, value):  # type: ignore[no-untyped-def]
        last = torch.tensor([query.shape[2] - 1])
        rows.append(probabilities_at(last, query, key, call.view.scaling, call.view.window)[0, :, 0])
        return full_attention(query, key, value, call.view)

    with torch.no_grad(), take_over(model, attend):
        model.base_model(input_ids=ids)
    points = torch.stack(rows)  # [layers, heads, positions]
    curve = error_curve(gram(points), STARTS, torch.Generator().manual_seed(0)).sum(0)
    heads = points.shape[1]
    expected = [
        sum(KMeans(count, n_init=STARTS, random_state=0).fit(each).inertia_ for each in points.double().numpy())
        for count in range(1, heads + 1)
    ]
    np.testing.assert_allclose(curve.numpy(), expected, rtol=0.01, atol=1e-9)
