"""Features of the embedded model: what K-Means finds on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from chai_eval.calibration.kmeans import error_curve, gram
from chai_eval.calibration.observe import observe
from chai_eval.models import load_model

STARTS = 40  # so many that neither misses the optimum by more than the tolerance


@pytest.mark.assets
def test_error_curves_of_real_attention_equal_scikit_learns_inertia() -> None:
    model, tokenizer = load_model("smollm2_mha", device="cpu", dtype="float32")
    text = "The harbour was quiet that morning. Two boats lay at anchor, and the men who owned them were asleep. " * 4
    ids = torch.tensor([tokenizer(text)["input_ids"][:64]])
    rows: list[torch.Tensor] = []

    observe(model, [ids], [lambda seen: rows.append(seen.last_row()[0])])
    points = torch.stack(rows)  # [layers, heads, positions]
    curve = error_curve(gram(points), STARTS, torch.Generator().manual_seed(0)).sum(0)
    heads = points.shape[1]
    expected = [
        sum(KMeans(count, n_init=STARTS, random_state=0).fit(each).inertia_ for each in points.double().numpy())
        for count in range(1, heads + 1)
    ]
    np.testing.assert_allclose(curve.numpy(), expected, rtol=0.01, atol=1e-9)
