from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

from chai_eval.attention.membership import average_linkage, cosine_distance, membership_of, partitions


def probe_like(rows: int, heads: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, heads, 15, generator=generator) ** 3


def test_distances_are_those_of_scipy() -> None:
    features = probe_like(4, 9)
    ours = cosine_distance(features)
    for row in range(4):
        theirs = cdist(features[row].double().numpy(), features[row].double().numpy(), "cosine")
        np.testing.assert_allclose(ours[row].numpy(), theirs, atol=1e-12)


@pytest.mark.parametrize(
    ("heads", "clusters"), [(12, 1), (12, 2), (12, 5), (12, 11), (12, 12), (32, 1), (32, 4), (32, 18)]
)
def test_partition_is_that_of_scikit_learn_for_every_row_of_a_batch(heads: int, clusters: int) -> None:
    features = probe_like(64, heads, seed=clusters)
    found = membership_of(features, clusters)
    for row in range(64):
        distance = cdist(features[row].double().numpy(), features[row].double().numpy(), "cosine")
        labels = AgglomerativeClustering(n_clusters=clusters, metric="precomputed", linkage="average").fit_predict(
            distance
        )
        assert adjusted_rand_score(labels, found.cluster[row].numpy()) == 1.0


def test_first_representative_is_the_lowest_head_and_clusters_are_numbered_by_it() -> None:
    found = membership_of(probe_like(32, 12), 4)
    for row in range(32):
        cluster = found.cluster[row].tolist()
        lowest = [cluster.index(number) for number in range(4)]
        assert lowest == sorted(lowest) == found.representative[row].tolist()


def test_medoid_has_the_smallest_summed_distance_to_its_cluster() -> None:
    features = probe_like(32, 12)
    found = membership_of(features, 3, "medoid")
    for row in range(32):
        distance = cdist(features[row].double().numpy(), features[row].double().numpy(), "cosine")
        for number in range(3):
            members = np.flatnonzero(found.cluster[row].numpy() == number)
            best = members[np.argmin(distance[np.ix_(members, members)].sum(1).round(12))]  # two members tie
            assert found.representative[row, number] == best


def test_ties_merge_the_lowest_heads_in_every_batch() -> None:
    # Heads 1, 3 and 4 are alike to the bit, so are 0 and 5: the first three merges are ties.
    distinct = probe_like(1, 3)[0]
    features = distinct[[0, 1, 2, 1, 1, 0]][None].repeat(5, 1, 1)
    assert membership_of(features, 5).cluster.tolist() == [[0, 1, 2, 3, 4, 0]] * 5
    assert membership_of(features, 4).cluster.tolist() == [[0, 1, 2, 1, 3, 0]] * 5
    assert membership_of(features, 3).cluster.tolist() == [[0, 1, 2, 1, 1, 0]] * 5
    alone = membership_of(features[:1], 4)
    assert torch.equal(alone.cluster[0], membership_of(features, 4).cluster[3])


@pytest.mark.parametrize("clusters", [1, 3, 8])
def test_rows_merge_alone_as_they_do_at_once_ties_and_all(clusters: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Whole numbers up to 3 of 8 heads: most merges are ties.
    steps = torch.randint(1, 4, (40, 8, 8), generator=generator).double().triu(1)
    distance = (steps + steps.transpose(1, 2)) / 4
    at_once = average_linkage(distance, clusters)
    for few in (1, 2):
        alone = [average_linkage(rows, clusters) for rows in distance.split(few)]
        assert torch.equal(torch.cat(alone), at_once)


def test_distances_in_another_order_of_memory_are_the_same_distances() -> None:
    distance = cosine_distance(probe_like(5, 9))
    strided = distance.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert torch.equal(average_linkage(strided, 3), average_linkage(distance, 3))


def test_one_probe_token_tells_heads_nothing_apart_and_still_gives_the_asked_count() -> None:
    found = membership_of(torch.ones(2, 6, 1), 3)
    assert found.cluster.tolist() == [[0, 0, 0, 0, 1, 2]] * 2


def test_linkage_down_to_every_head_keeps_all_heads() -> None:
    distance = cosine_distance(probe_like(2, 7))
    assert average_linkage(distance, 7).tolist() == [list(range(7))] * 2


def test_partitions_into_all_numbers_of_clusters_are_those_into_each() -> None:
    distance = torch.cat((cosine_distance(probe_like(6, 8)), torch.zeros(1, 8, 8).double()))
    found = partitions(distance)
    for clusters in range(1, 9):
        assert torch.equal(found[:, clusters - 1], average_linkage(distance, clusters))
    assert partitions(torch.zeros(2, 1, 1).double()).tolist() == [[[0]], [[0]]]


def test_a_membership_is_found_where_gradients_are_kept_too() -> None:
    features = probe_like(4, 9)
    kept = features.clone().requires_grad_()
    assert torch.equal(membership_of(kept, 3, "medoid").cluster, membership_of(features, 3, "medoid").cluster)


def test_heads_that_hold_no_numbers_still_give_the_asked_count() -> None:
    features = probe_like(3, 7)
    features[1] = torch.nan
    features[2, 4] = torch.nan
    found = membership_of(features, 3)
    assert [len(set(row)) for row in found.cluster.tolist()] == [3, 3, 3]
    assert found.cluster[0].tolist() == membership_of(features[:1], 3).cluster[0].tolist()


def test_heads_that_nearly_all_look_at_the_first_token_are_told_apart() -> None:
    elsewhere = torch.tensor([3e-5, 0.0, 1e-5])
    features = torch.stack((torch.ones(3), 1 - elsewhere, elsewhere), dim=1)[None]
    # Distances of 3.4e-10, 1.5e-10 and 4e-11: heads 1 and 2 are closest.
    assert membership_of(features, 2).cluster.tolist() == [[0, 1, 1]]
