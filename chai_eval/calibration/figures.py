"""Figures of the facts about a choice of clusters, from their tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from chai_eval.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 6
# The number of a layer under which a table has the mean over all of them.
EVERY_LAYER = -1

INSTALL = "pip install -c constraints.txt -e '.[figures]'"


def to_be_drawn(wanted: bool | None) -> bool:
    """Whether figures are drawn: as wanted (SettingError without matplotlib), and for None where it is installed."""
    installed = importlib.util.find_spec("matplotlib") is not None
    if wanted and not installed:
        raise SettingError(f"figures: true given, and matplotlib isn't installed; allowed: false, null, or {INSTALL}")
    return installed if wanted is None else wanted


def draw_all(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Draw each table's figure as `<folder>/<name>.png`."""
    drawn: dict[str, Callable[[pd.DataFrame], Figure]] = {
        "head_correlation": correlation_figure,
        "error_curves": error_figure,
        "membership_changes": change_figure,
        "cluster_sizes": size_figure,
        "cluster_drift": drift_figure,
    }
    for name, table in tables.items():
        if len(table):
            drawn[name](table).savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")


def correlation_figure(table: pd.DataFrame) -> Figure:
    """Correlation of heads, a square a layer."""

    def draw(axes: Axes, layer: pd.DataFrame) -> None:
        square = layer.pivot_table(index="head", columns="other", values="correlation")
        image.append(axes.imshow(square.to_numpy(), vmin=-1, vmax=1, cmap="RdBu_r"))
        axes.set_xticks([])
        axes.set_yticks([])

    image: list[object] = []
    figure = _by_layer(table, draw)
    figure.colorbar(image[0], ax=figure.axes, shrink=0.6, label="correlation of two heads' attention")  # type: ignore[arg-type]
    return figure


def error_figure(table: pd.DataFrame) -> Figure:
    """Error over the number of clusters, with the elbow."""

    def draw(axes: Axes, layer: pd.DataFrame) -> None:
        axes.plot(layer["clusters"], layer["relative"], linewidth=1)
        if "low" in layer:
            axes.fill_between(layer["clusters"], layer["low"], layer["high"], alpha=0.3)
        elbow = layer[layer["is_elbow"]]
        axes.plot(elbow["clusters"], elbow["relative"], "o", markersize=4)
        axes.set_ylim(-0.05, 1.05)

    figure = _by_layer(table, draw)
    figure.supxlabel("clusters (dot: elbow)", fontsize=8)
    figure.supylabel("error, relative to a single cluster", fontsize=8)
    return figure


def change_figure(table: pd.DataFrame) -> Figure:
    """Share of heads whose cluster is another one than by the longest probe, a line a layer."""
    figure = _figure((7, 4))
    axes = figure.subplots()
    for _, layer in table.groupby("layer"):
        axes.plot(layer["probe_tokens"], 100 * layer["unlike_longest"], linewidth=0.6, color="0.7")
    mean = table.groupby("probe_tokens")[["unlike_longest", "changed"]].mean() * 100
    axes.plot(mean.index, mean["unlike_longest"], label="unlike the longest probe")
    axes.plot(mean.index, mean["changed"], label="changed by the last token")
    axes.set(xlabel="probe tokens", ylabel="heads in another cluster, %", ylim=(0, None))
    axes.legend()
    return figure


def size_figure(table: pd.DataFrame) -> Figure:
    """Sizes of clusters, stacked, a bar a layer."""
    figure = _figure((8, 3.5))
    axes = figure.subplots()
    sizes = table.pivot_table(index="layer", columns="rank", values="size").fillna(0)
    sizes.plot.bar(stacked=True, ax=axes, legend=False, cmap="viridis", width=0.9)
    axes.set(xlabel="layer", ylabel="heads (one stripe a cluster)")
    return figure


def drift_figure(table: pd.DataFrame) -> Figure:
    """How far clusters of later windows agree with the probe's: a line a layer; their mean with its interval."""
    figure = _figure((7, 4))
    axes = figure.subplots()
    for _, layer in table[(table["layer"] != EVERY_LAYER) & (table["against"] == "probe")].groupby("layer"):
        axes.plot(layer["end"], layer["agreement"], linewidth=0.6, color="0.7")
    for against, said in (("probe", "with the probe"), ("before", "with the window just before")):
        mean = table[(table["layer"] == EVERY_LAYER) & (table["against"] == against)]
        whiskers = [mean["agreement"] - mean["low"], mean["high"] - mean["agreement"]]
        axes.errorbar(mean["end"], mean["agreement"], yerr=whiskers, marker="o", markersize=4, capsize=2, label=said)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="window ends at token", ylabel="agreement of clusters (adjusted Rand index)")
    axes.legend(title="mean over layers (grey: each, with the probe)", fontsize=8, title_fontsize=8)
    return figure


def _by_layer(table: pd.DataFrame, draw: Callable[[Axes, pd.DataFrame], None]) -> Figure:
    layers = list(table.groupby("layer"))
    columns = min(COLUMNS, len(layers))
    rows = ceil(len(layers) / columns)
    figure = _figure((1.7 * columns, 1.6 * rows + 0.6))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, (number, layer) in zip(grid, layers, strict=False):
        draw(axes, layer)
        axes.set_title(f"layer {number}", fontsize=7)
        axes.tick_params(labelsize=6)
    for axes in grid[len(layers) :]:
        figure.delaxes(axes)
    return figure


def _figure(size: tuple[float, float]) -> Figure:
    # A figure of its own, not pyplot's: nothing global, and no display is needed.
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
