"""What heads attend to: how alike (the paper's Figure 2), and what fewer clusters lose, with elbows (Figure 8)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from chai_eval.attention.membership import average_linkage, cosine_distance
from chai_eval.calibration.analysis import correlation_table, pearson
from chai_eval.calibration.counts import elbows
from chai_eval.calibration.figures import correlation_figure, error_figure
from chai_eval.calibration.kmeans import gram
from chai_eval.calibration.observe import Seen, Watcher, observe
from chai_eval.calibration.progress import progress
from chai_eval.calibration.sums import ErrorCurves
from chai_eval.experiments.figures import Curve, legend, lines, panels
from chai_eval.experiments.outcome import Outcome
from chai_eval.experiments.plan import Plan
from chai_eval.experiments.seen import Sample, interval_text, mean_interval, read_sample
from chai_eval.markdown import table
from chai_eval.methods.clusters import cluster_counts
from chai_eval.report.paper import incomparable
from chai_eval.resources import paper_dir
from chai_eval.session import Session

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Pairs of heads: all of a layer, those that share a cluster, those that don't.
PAIRS = {"pairs": "all pairs of heads", "within": "within a cluster", "between": "in different clusters"}
ALL = "all"

# By layer and name, what is seen of each request.
Found = dict[int, dict[str, NDArray[np.float64]]]


def head_correlation(plan: Plan, session: Session) -> Outcome:
    """Correlation of every two heads' attention of the last token over all positions; raises as `analyse` does."""
    sample = read_sample(plan, session)
    counts = None if plan.analysis.counts is None else list(cluster_counts(plan.analysis.counts, sample.model))
    total = torch.zeros(sample.shape.layers, sample.shape.heads, sample.shape.heads, dtype=torch.float64)
    parts: dict[int, list[dict[str, Tensor]]] = {}

    def watch(seen: Seen) -> None:
        layer, correlation = seen.call.index, pearson(seen.last_row().double().cpu())
        total[layer] += correlation.sum(0)
        lowest = None
        if counts is not None:
            lowest = average_linkage(cosine_distance(seen.probe(plan.analysis.probe_tokens)), counts[layer]).cpu()
        parts.setdefault(layer, []).append(means_of_pairs(correlation, lowest))

    _watched(sample, "correlation", watch)
    found = _joined(parts)
    frame = _by_layer(found, counts)
    return Outcome(
        sample.described(plan),
        {"data": frame},
        f"{sample.sentence}. Pearson's correlation of two heads' attention of a request's last token.\n\n"
        + _correlation_table(plan, frame),
        large={"pairs": correlation_table(total / sample.count)},
        figures={
            plan.experiment.name: partial(_heat_maps, total / sample.count, plan),
            "by_layer": partial(_correlation_by_layer, frame, plan),
        },
    )


def error_curves(plan: Plan, session: Session) -> Outcome:
    """The error of clustering each layer's heads, over the number of clusters, with its elbow; raises as `analyse`."""
    sample, settings = read_sample(plan, session), plan.analysis
    curves = ErrorCurves(settings.features, settings.algorithm, settings.starts)
    generator = torch.Generator().manual_seed(settings.seed)
    parts: dict[int, list[dict[str, Tensor]]] = {}

    def watch(seen: Seen) -> None:
        features = seen.last_row() if curves.features == "last_row" else seen.probe(settings.probe_tokens)
        exact = features.double().cpu()
        error = curves.of(gram(exact), cosine_distance(exact), generator)
        parts.setdefault(seen.call.index, []).append({"error": error})

    _watched(sample, "clustering error", watch)
    error = [found["error"] for _, found in sorted(_joined(parts).items())]
    frame = error_frame(error)
    return Outcome(
        sample.described(plan),
        {"data": frame},
        f"{sample.sentence}. Squared distances of heads' attention to the means of their clusters "
        f"({settings.algorithm} on {settings.features}), relative to a single cluster; elbows by Kneedle on the mean "
        "curve.\n\n" + _error_table(plan, frame, sample),
        figures={plan.experiment.name: partial(_error_figure, frame, plan)},
    )


def means_of_pairs(correlation: Tensor, lowest: Tensor | None) -> dict[str, Tensor]:
    """Mean correlation over pairs of different heads, of each request; nan where there is no such pair.

    Parameters
    ----------
    correlation : Tensor [samples, heads, heads], float64
    lowest : Tensor [samples, heads], int64, or None
        For each head the lowest head of its cluster.

    Returns
    -------
    dict of str to Tensor [samples]
        By the names of `PAIRS`; only the first without clusters.
    """
    heads = correlation.shape[-1]
    pairs = torch.ones(heads, heads, dtype=torch.bool).triu(1).expand_as(correlation)
    masks = {"pairs": pairs}
    if lowest is not None:
        same = lowest[:, :, None] == lowest[:, None, :]
        masks |= {"within": pairs & same, "between": pairs & ~same}
    return {name: (correlation * mask).sum((1, 2)) / mask.sum((1, 2)) for name, mask in masks.items()}


def error_frame(error: Sequence[NDArray[np.float64]]) -> pd.DataFrame:
    """One row a layer and number of clusters, from errors `[samples, heads]` of each layer.

    Returns
    -------
    DataFrame
        `layer`, `clusters`, `error` (mean), `relative` to that of a single cluster (mean, with `low` and `high`, its
        95 % interval), `is_elbow`.
    """
    means = torch.from_numpy(np.stack([each.mean(0) for each in error]))
    rows = []
    for layer, (each, elbow) in enumerate(zip(error, elbows(means), strict=True)):
        relative = each / np.maximum(each[:, :1], 1e-300)
        for at in range(each.shape[1]):
            ends = dict(zip(("relative", "low", "high"), mean_interval(relative[:, at]), strict=True))
            error_here = float(means[layer, at])
            rows.append({"layer": layer, "clusters": at + 1, "error": error_here, **ends, "is_elbow": at + 1 == elbow})
    return pd.DataFrame(rows)


def _watched(sample: Sample, what: str, watch: Watcher) -> None:
    observe(sample.model, progress(sample.batches, len(sample.batches), what, "batches"), [watch])


def _joined(parts: dict[int, list[dict[str, Tensor]]]) -> Found:
    return {
        layer: {name: torch.cat([each[name] for each in found]).numpy() for name in found[0]}
        for layer, found in sorted(parts.items())
    }


def _by_layer(found: Found, counts: Sequence[int] | None) -> pd.DataFrame:
    """A row a layer, and one in which each request counts with its mean over layers."""
    together = {
        name: np.array([_mean(column) for column in np.stack([each[name] for each in found.values()]).T])
        for name in found[0]
    }
    rows = []
    for layer, means in [*((str(layer), each) for layer, each in found.items()), (ALL, together)]:
        row: dict[str, Any] = {"layer": layer}
        if counts is not None:
            row["clusters"] = "" if layer == ALL else counts[int(layer)]
        for name, values in means.items():
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), mean_interval(values), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def _mean(values: NDArray[np.float64]) -> float:
    given = values[~np.isnan(values)]
    return float(given.mean()) if given.size else float("nan")


def _correlation_table(plan: Plan, frame: pd.DataFrame) -> str:
    shown = {name: said for name, said in PAIRS.items() if name in frame}
    lines_ = []
    for each in frame.to_dict("records"):
        line = {"layer (quick)" if plan.quick else "layer": str(each["layer"])}
        if "clusters" in frame:
            line["clusters"] = str(each["clusters"])
        for name, said in shown.items():
            line[said] = interval_text(each[f"{name}{end}"] for end in ("", "_low", "_high"))
        lines_.append(line)
    why = incomparable(plan.analysis.model, plan.experiment.paper_model)
    said = why or "not comparable: the paper draws a heat map, whose figures are not known to us"
    clusters = (
        "" if "clusters" in frame else " No cluster counts are known for this model, so pairs are not told apart."
    )
    means = f"Means over pairs, with 95 % intervals over requests.{clusters} Beside the paper: {said}."
    return f"{table(lines_).rstrip()}\n\n{means}"


def _error_table(plan: Plan, frame: pd.DataFrame, sample: Sample) -> str:
    published = published_counts(plan.experiment.paper_model)
    why = incomparable(plan.analysis.model, plan.experiment.paper_model)
    why = why or (None if published else "not comparable: the paper has no counts for it")
    heads, lines_, found = sample.shape.heads, [], []
    for layer, own in frame[frame["is_elbow"]].groupby("layer"):
        each = own.iloc[0]
        found.append(int(each["clusters"]))
        line = {
            "layer (quick)" if plan.quick else "layer": str(layer),
            "elbow": f"{found[-1]} of {heads}",
            "error there, relative": interval_text(each[["relative", "low", "high"]], 3),
        }
        if why is None:
            line["published count"] = str(published[int(str(layer))])
        lines_.append(line)
    saved = 100 * sum(heads - each for each in found) / (2 * heads * len(found))
    said = [table(lines_, left=0).rstrip("\n")]
    if sample.shape.kv_heads == heads:
        said.append(f"As counts these elbows save {saved:.1f} % of the K,V cache.")
    if why is not None:
        said.append(f"Beside the paper: {why}.")
    else:
        same = sum(a == b for a, b in zip(found, published, strict=True))
        theirs = 100 * sum(heads - each for each in published) / (2 * heads * len(published))
        judged = "agrees" if same == len(found) else f"differs by {saved - theirs:+.1f} points of the K,V cache"
        said.append(
            f"Beside the paper: {judged}; {same} of {len(found)} layers have the published count, and the published "
            f"counts save {theirs:.1f} %."
        )
    return "\n\n".join(said)


def published_counts(paper_model: str | None) -> list[int]:
    """Clusters of each layer that the paper's authors published for a model; empty where they didn't."""
    known = json.loads((paper_dir() / "cluster_counts.json").read_text(encoding="utf-8"))
    return [count for count, layers in known.get(paper_model, {"runs": []})["runs"] for _ in range(layers)]


def _heat_maps(correlation: Tensor, plan: Plan) -> Figure:
    figure = correlation_figure(correlation_table(correlation))
    figure.suptitle(f"{plan.title}, {plan.model}", fontsize=9)
    return figure


def _error_figure(frame: pd.DataFrame, plan: Plan) -> Figure:
    figure = error_figure(frame)
    figure.suptitle(f"{plan.title}, {plan.model} (bands: 95 % intervals over requests)", fontsize=9)
    return figure


def _correlation_by_layer(frame: pd.DataFrame, plan: Plan) -> Figure:
    figure, (axes,) = panels(f"{plan.title}, {plan.model}", 1, size=(7, 3.6))
    own = frame[frame["layer"] != ALL]
    parts = [
        pd.DataFrame({
            "layer": own["layer"].astype(int), "of": said,
            **{end or "mean": own[f"{name}{end}"] for end in ("", "_low", "_high")},
        })
        for name, said in PAIRS.items()
        if name in own
    ]  # fmt: skip
    together = pd.concat(parts).dropna(subset="mean")
    curve = Curve("layer", "mean", "_low", "_high", "of", joined=False)
    lines(axes, together, curve, "correlation of two heads' attention")
    axes.set_xlabel("layer")
    legend(axes, "bars: 95 % intervals")
    return figure
