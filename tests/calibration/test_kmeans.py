from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics.pairwise import cosine_distances

from chai_eval.attention.membership import cosine_distance, partitions
from chai_eval.calibration.kmeans import error_curve, gram
from chai_eval.calibration.sums import partition_errors

STARTS = 10


def attention_like(problems: int, heads: int, positions: int = 64) -> torch.Tensor:
    """Rows of probabilities as uneven as attention's, of heads that resemble one of a few, more or less."""
    generator = torch.Generator().manual_seed(heads)
    kinds = 4 * torch.randn(problems, 1 + heads // 3, positions, generator=generator)
    kind = torch.randint(kinds.shape[1], (problems, heads), generator=generator)
    own = torch.randn(problems, heads, positions, generator=generator)
    return (kinds[torch.arange(problems)[:, None], kind] + own).softmax(-1)


@pytest.mark.parametrize("heads", [2, 9])
def test_error_of_each_count_equals_scikit_learns_inertia(heads: int) -> None:
    points = attention_like(6, heads)
    curve = error_curve(gram(points), STARTS, torch.Generator().manual_seed(0)).sum(0)
    expected = [
        sum(KMeans(count, n_init=STARTS, random_state=0).fit(each).inertia_ for each in points.double().numpy())
        for count in range(1, heads + 1)
    ]
    # Both find the best of ten starts, which is not always the optimum: 1 % is what that leaves.
    np.testing.assert_allclose(curve.numpy(), expected, rtol=0.01, atol=1e-9)


def test_heads_that_attend_alike_need_no_clusters_of_their_own() -> None:
    points = attention_like(3, 4).repeat_interleave(2, dim=1)  # 8 heads, each twice
    curve = error_curve(gram(points), STARTS, torch.Generator().manual_seed(0))
    assert torch.isfinite(curve).all()
    assert (curve[:, 3:] < 1e-12).all()
    assert (curve[:, 2] > 1e-6).all()


def test_average_linkage_curve_equals_scikit_learns_partition() -> None:
    points = attention_like(5, 9)
    errors = partition_errors(gram(points), partitions(cosine_distance(points)))
    for row, each in enumerate(points.double().numpy()):
        for count in range(1, 10):
            labels = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit_predict(
                cosine_distances(each)
            )
            expected = sum(((each[labels == c] - each[labels == c].mean(0)) ** 2).sum() for c in range(count))
            assert float(errors[row, count - 1]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
