"""Four facts about a choice of clusters: who attends alike, what fewer clusters lose, how soon membership settles."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.membership import average_linkage, cosine_distance
from chai_eval.attention.shape import AttentionShape, attention_shape
from chai_eval.calibration.counts import elbows
from chai_eval.calibration.kmeans import gram
from chai_eval.calibration.observe import Seen, observe
from chai_eval.calibration.progress import progress
from chai_eval.calibration.sums import ErrorCurves


def correlation_and_error(
    model: PreTrainedModel, batches: Sequence[Tensor], curves: ErrorCurves, probe_tokens: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Correlation of heads and error curves, means over samples, from batches `[samples, tokens]`, int64.

    `probe_tokens` are those of the features "probe", `seed` is of the starts of K-Means.

    Returns
    -------
    Tensor [layers, heads, heads], float64
        Pearson's, of two heads' attention of the last token over all positions (the paper's Figure 2).
    Tensor [layers, heads], float64
        Column k - 1: Σ_h ‖x_h - μ_c(h)‖² with k clusters (the paper's Figure 8).
    """
    shape = attention_shape(model)
    correlation = torch.zeros(shape.layers, shape.heads, shape.heads, dtype=torch.float64)
    error = torch.zeros(shape.layers, shape.heads, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)

    def watch(seen: Seen) -> None:
        last = seen.last_row().double().cpu()
        features = last if curves.features == "last_row" else seen.probe(probe_tokens).double().cpu()
        correlation[seen.call.index] += pearson(last).sum(0)
        error[seen.call.index] += curves.of(gram(features), cosine_distance(features), generator).sum(0)

    observe(model, progress(batches, len(batches), "correlation", "batches"), [watch])
    samples = max(sum(map(len, batches)), 1)
    return correlation / samples, error / samples


def follow_membership(
    model: PreTrainedModel, batches: Sequence[Tensor], counts: Sequence[int], longest: int
) -> list[Tensor]:
    """Membership by the first 1, 2, ... tokens, up to `longest`, in so many clusters (`counts`) of each layer.

    From batches `[samples, tokens]`, int64, to `[samples, longest, heads]` of each layer: for each head the lowest head
    of its cluster.
    """
    found: list[list[Tensor]] = [[] for _ in counts]

    def watch(seen: Seen) -> None:
        count, layer = counts[seen.call.index], found[seen.call.index]
        lengths = range(1, seen.query.shape[2] + 1)
        layer.append(torch.stack([average_linkage(cosine_distance(seen.probe(n)), count).cpu() for n in lengths], 1))

    probes = (tokens[:, :longest] for tokens in batches)
    observe(model, progress(probes, len(batches), "membership", "batches"), [watch])
    return [torch.cat(each) for each in found]


def correlation_table(correlation: Tensor) -> pd.DataFrame:
    """One row a pair of heads: `layer`, `head`, `other`, `correlation`."""
    layers, heads, _ = correlation.shape
    index = pd.MultiIndex.from_product([range(layers), range(heads), range(heads)], names=["layer", "head", "other"])
    return pd.DataFrame({"correlation": correlation.flatten().numpy()}, index=index).reset_index()


def error_table(error: Tensor) -> pd.DataFrame:
    """One row a layer and count: `layer`, `clusters`, `error`, `relative` (to a single cluster), `is_elbow`."""
    layers, heads = error.shape
    index = pd.MultiIndex.from_product([range(layers), range(1, heads + 1)], names=["layer", "clusters"])
    table = pd.DataFrame({"error": error.flatten().numpy()}, index=index).reset_index()
    table["relative"] = (error / error[:, :1].clamp(min=1e-300)).flatten().numpy()
    table["is_elbow"] = table["clusters"] == table["layer"].map(dict(enumerate(elbows(error))))
    return table


def change_table(membership: Sequence[Tensor], counts: Sequence[int], shape: AttentionShape) -> pd.DataFrame:
    """How membership moves as more tokens are seen: one row a clustered layer and probe length.

    `layer`, `clusters`, `probe_tokens`, `changed` (share of heads that are in a cluster with another lowest head than
    by one token less) and `unlike_longest` (than by the longest probe).
    """
    tables = []
    for layer, (lowest, count) in enumerate(zip(membership, counts, strict=True)):
        if count in (1, shape.heads):
            continue  # nothing can move
        changed = (lowest[:, 1:] != lowest[:, :-1]).double().mean((0, 2))
        unlike = (lowest != lowest[:, -1:]).double().mean((0, 2))
        table = pd.DataFrame({"probe_tokens": range(1, lowest.shape[1] + 1), "unlike_longest": unlike.numpy()})
        table["changed"] = [float("nan"), *changed.tolist()]
        table.insert(0, "layer", layer)
        table.insert(1, "clusters", count)
        tables.append(table)
    columns = ["layer", "clusters", "probe_tokens", "changed", "unlike_longest"]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def size_table(membership: Sequence[Tensor], probe_tokens: int) -> pd.DataFrame:
    """Sizes of clusters by a probe: `layer`, `rank` (0 is the largest cluster), `size` (heads, mean over samples)."""
    rows = []
    for layer, lowest in enumerate(membership):
        at = lowest[:, min(probe_tokens, lowest.shape[1]) - 1]
        sizes, _ = torch.zeros_like(at).scatter_add_(1, at, torch.ones_like(at)).sort(1, descending=True)
        means = sizes.double().mean(0)
        rows += [(layer, rank, float(size)) for rank, size in enumerate(means) if size > 0]
    return pd.DataFrame(rows, columns=["layer", "rank", "size"])


def cluster_table(membership: Sequence[Tensor], probe_tokens: int) -> pd.DataFrame:
    """The clusters of the first sample by a probe: `layer`, `clusters`, `heads` (`0 3 5 · 1 · 2 4`, lowest first)."""
    rows = []
    for layer, lowest in enumerate(membership):
        at = lowest[0, min(probe_tokens, lowest.shape[1]) - 1].tolist()
        groups = [" ".join(str(head) for head, own in enumerate(at) if own == first) for first in sorted(set(at))]
        rows.append((layer, len(groups), " · ".join(groups)))
    return pd.DataFrame(rows, columns=["layer", "clusters", "heads"])


def pearson(rows: Tensor) -> Tensor:
    """Correlation of every two rows of `[..., heads, keys]`: `[..., heads, heads]`; 0 with a row that is constant."""
    centred = rows - rows.mean(-1, keepdim=True)
    unit = torch.nn.functional.normalize(centred, dim=-1)
    return unit @ unit.transpose(-1, -2)
