"""How the membership of heads changes as the probe sees more tokens (the paper's Figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from chai_eval.calibration.analysis import follow_membership
from chai_eval.errors import SettingError
from chai_eval.experiments.figures import Curve, legend, lines, panels
from chai_eval.experiments.outcome import Outcome
from chai_eval.experiments.plan import Plan
from chai_eval.experiments.seen import interval_text, mean_interval, read_sample
from chai_eval.markdown import table
from chai_eval.methods.clusters import cluster_counts
from chai_eval.session import Session

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a membership is held against: that of one token less, and that of the longest probe.
REFERENCES = ("previous", "longest")
ALL = "all"
SHOWN_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


def membership_changes(plan: Plan, session: Session) -> Outcome:
    """Follow the membership of every layer that is clustered, token by token, over samples of text; raises as `analyse`
    does, and where a model has no cluster counts.
    """
    sample = read_sample(plan, session)
    counts = list(cluster_counts(plan.analysis.counts, sample.model))
    clustered = [layer for layer, count in enumerate(counts) if 1 < count < sample.shape.heads]
    if not clustered:
        raise SettingError("counts: no layer has clusters that could change; allowed: fewer clusters than heads")
    found = follow_membership(sample.model, sample.batches, counts, plan.analysis.longest_probe)
    changes = {layer: compared(found[layer]) for layer in clustered}
    frame = change_frame(changes, counts)
    body = f"{sample.sentence}, {len(clustered)} clustered layers.\n\n" + _table(
        plan, frame, plan.analysis.probe_tokens
    )
    return Outcome(
        sample.described(plan),
        {"data": frame},
        body,
        figures={plan.experiment.name: partial(draw, frame, plan)},
    )


def compared(lowest: Tensor) -> dict[str, NDArray[np.float64]]:
    """Hold each membership of a layer against that of one token less, and against that of the longest probe.

    Parameters
    ----------
    lowest : Tensor [samples, longest, heads], int64
        See `follow_membership`.

    Returns
    -------
    dict of str to array [samples, longest]
        `moved_<reference>`, the share of heads that change their cluster, and `rand_<reference>`, the adjusted Rand
        index, for each of `REFERENCES`; nan where there is no token less.
    """
    samples, longest, _ = lowest.shape
    rows = [[tuple(labels) for labels in of_sample] for of_sample in lowest.tolist()]
    found = {
        f"{what}_{reference}": np.full((samples, longest), np.nan)
        for what in ("moved", "rand")
        for reference in REFERENCES
    }
    for at, of_sample in enumerate(rows):
        for length, labels in enumerate(of_sample):
            others = {"longest": of_sample[-1], **({"previous": of_sample[length - 1]} if length else {})}
            for reference, other in others.items():
                found[f"moved_{reference}"][at, length] = moved(labels, other)
                found[f"rand_{reference}"][at, length] = rand(labels, other)
    return found


@lru_cache(maxsize=1 << 16)
def moved(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Share of heads that change their cluster from one membership to another.

    Clusters have no names, so those of the two are matched so that as many heads as possible stay (assignment, Kuhn
    1955): a cluster whose lowest head leaves it is still the same cluster.
    """
    if one == other:
        return 0.0
    common = contingency_matrix(one, other)
    rows, columns = linear_sum_assignment(common, maximize=True)
    return 1 - float(common[rows, columns].sum()) / len(one)


@lru_cache(maxsize=1 << 16)
def rand(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Adjusted Rand index (Hubert and Arabie, 1985): 1 for the same clusters, 0 for as much in common as by chance."""
    return 1.0 if one == other else float(adjusted_rand_score(one, other))


def change_frame(changes: dict[int, dict[str, NDArray[np.float64]]], counts: Sequence[int]) -> pd.DataFrame:
    """One row a layer and probe length, and for all layers together: means over requests with 95 % intervals.

    Returns
    -------
    DataFrame
        `layer`, `clusters`, `probe_tokens`, and for each name of `compared` its mean, `_low` and `_high`; the layer is
        `all` where each request counts with its mean over layers.
    """
    layers = [(str(layer), counts[layer], found) for layer, found in changes.items()]
    together = {
        name: np.mean([found[name] for found in changes.values()], axis=0) for name in next(iter(changes.values()))
    }
    rows = []
    for layer, clusters, found in [*layers, (ALL, "", together)]:
        for at in range(next(iter(found.values())).shape[1]):
            row: dict[str, object] = {"layer": layer, "clusters": clusters, "probe_tokens": at + 1}
            for name, values in found.items():
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), mean_interval(values[:, at]), strict=True))
            rows.append(row)
    return pd.DataFrame(rows)


def _table(plan: Plan, frame: pd.DataFrame, probe: int) -> str:
    own = {int(each["probe_tokens"]): each for each in frame[frame["layer"] == ALL].to_dict("records")}
    longest, shown = max(own), []

    def cell(length: int, name: str, digits: int, times: float) -> str:
        return interval_text((own[length][f"{name}{end}"] for end in ("", "_low", "_high")), digits, times)

    for length in sorted({*SHOWN_LENGTHS, probe, longest} & {*own}):
        shown.append({
            "probe tokens (quick)" if plan.quick else "probe tokens": str(length),
            "heads changed by the last token (%)": cell(length, "moved_previous", 1, 100),
            "adjusted Rand index to one token less": cell(length, "rand_previous", 3, 1),
            "heads elsewhere than by the longest probe (%)": cell(length, "moved_longest", 1, 100),
            "adjusted Rand index to the longest probe": cell(length, "rand_longest", 3, 1),
        })  # fmt: skip
    said = [table(shown, left=0).rstrip("\n"), "Means over layers, with 95 % intervals over requests."]
    if probe in own:
        share = cell(probe, "moved_longest", 1, 100)
        said.append(f"By {probe} tokens {share} % of heads are in another cluster than by {longest}.")
    said.append("Beside the paper: not comparable: it draws a curve, whose figures are not known to us.")
    return "\n\n".join(said)


def draw(frame: pd.DataFrame, plan: Plan) -> Figure:
    """Share of heads that change their cluster, and the adjusted Rand index, over probe tokens; a pale line a layer."""
    figure, axes = panels(f"{plan.title}, {plan.model}", 2)
    names = {"previous": "by one token less", "longest": "by the longest probe"}
    for where, what, times, label in (
        (axes[0], "moved", 100.0, "heads in another cluster, %"),
        (axes[1], "rand", 1.0, "adjusted Rand index"),
    ):
        for _, layer in frame[frame["layer"] != ALL].groupby("layer", sort=False):
            where.plot(layer["probe_tokens"], times * layer[f"{what}_longest"], linewidth=0.4, color="0.75", zorder=0)
        own = frame[frame["layer"] == ALL]
        parts = [
            pd.DataFrame({
                "probe_tokens": own["probe_tokens"], "than": f"than {said}" if what == "moved" else f"with that {said}",
                **{end or "mean": times * own[f"{what}_{reference}{end}"] for end in ("", "_low", "_high")},
            })
            for reference, said in names.items()
        ]  # fmt: skip
        both = pd.concat(parts).dropna(subset="mean")
        lines(where, both, Curve("probe_tokens", "mean", "_low", "_high", "than"), label)
        where.set_xlabel("probe tokens")
        where.set_ylim(bottom=0)
        where.axvline(plan.analysis.probe_tokens, color="0.5", linewidth=0.8, linestyle=":")
        where.legend(frameon=False, fontsize=7)
    axes[1].plot([], [], color="0.75", linewidth=0.4, label="a layer, with that by the longest probe")
    legend(axes[1], "bars: 95 % intervals over requests")
    return figure
