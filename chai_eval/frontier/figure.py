"""Figures of a frontier: a curve a method, with intervals; what another method dominates is dimmed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by the colour-blind; markers tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F", "#999999", "#882255")
MARKERS = "osD^vPX*<>"
DIM = 0.35
# Share of the bytes held that points compared by position save: CHAI's at its balanced preset.
COMPARED_AT = 0.14
# Characters of a line below the figure.
WIDTH = 180


def draw(frame: pd.DataFrame, title: str, command: str, folder: Path) -> None:
    """Draw KL over the bytes held and over the bytes read, as `frontier.svg` and `frontier.png`.

    Parameters
    ----------
    frame : DataFrame
        See `points.table`.
    command : str
        What made it, written below.
    """
    title = f"{title}. Bars: 95 % intervals over sequences; pale: dominated"
    with _figure((10, 4.6), title, command, folder / "frontier") as figure:
        both = figure.subplots(1, 2, sharey=True)
        for axes, of in zip(both, ("held", "read"), strict=True):
            for number, (method, own) in enumerate(frame.groupby("method", sort=True)):
                line = own.assign(saved=100 * (1 - own[of])).sort_values("saved")
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                axes.plot(line["saved"], line["kl"], color=colour, linewidth=1, label=None, zorder=1)
                for each in line.to_dict("records"):
                    whiskers = [[each["kl"] - (each["kl_low"] or 0)], [(each["kl_high"] or each["kl"]) - each["kl"]]]
                    axes.errorbar(
                        each["saved"], each["kl"], yerr=whiskers, color=colour, marker=marker, markersize=5, capsize=2,
                        alpha=DIM if each["dominated"] else 1, linestyle="none",
                    )  # fmt: skip
                axes.plot([], [], color=colour, marker=marker, markersize=5, label=str(method))
            axes.set_xlabel(f"K,V bytes {'held' if of == 'held' else 'read by a decoded token'}, % saved")
            axes.set_yscale("log")
            axes.grid(alpha=0.3, linewidth=0.5)
        both[0].set_ylabel("KL(MHA ‖ method), nats per token")
        both[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_positions(by_bin: pd.DataFrame, frame: pd.DataFrame, title: str, command: str, folder: Path) -> None:
    """Draw KL over the position in the text, of each method's point that saves most nearly `COMPARED_AT` of the bytes
    held, as `positions.svg` and `positions.png`.

    Parameters
    ----------
    by_bin : DataFrame
        See `points.positions`.
    frame, command
        As `draw` has them.
    """
    title = (
        f"{title}: by position, where about {100 * COMPARED_AT:.0f} % of the bytes held are saved. Bars: 95 % intervals"
    )
    with _figure((8, 4.6), title, command, folder / "positions") as figure:
        axes = figure.subplots()
        for number, (method, own) in enumerate(frame.groupby("method", sort=True)):
            point = own.iloc[int((1 - own["held"] - COMPARED_AT).abs().argmin())]
            # A probe's tokens lose nothing, which a logarithm can't show.
            line = by_bin[(by_bin["point"] == point["point"]) & (by_bin["kl"] > 0)]
            axes.errorbar(
                (line["start"].clip(lower=1) * line["end"]) ** 0.5,
                line["kl"],
                yerr=[line["kl"] - line["low"].fillna(line["kl"]), line["high"].fillna(line["kl"]) - line["kl"]],
                color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
                markersize=5, capsize=2, linewidth=1, label=f"{method}, {100 * (1 - point['held']):.0f} %",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.set(xlabel="position in the text, tokens", ylabel="KL(MHA ‖ method), nats per token")
        figure.legend(loc="outside right center", frameon=False)


@contextmanager
def _figure(size: tuple[float, float], title: str, command: str, path: Path) -> Iterator[Figure]:
    """A figure to draw on, written as SVG and PNG when that is done."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The same data give the same file: no date, no random names in it.
    with mpl.rc_context({"svg.hashsalt": "frontier", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.suptitle(title, fontsize=9)
        figure.supxlabel("\n".join(textwrap.wrap(command, WIDTH)), fontsize=6)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=130, metadata={"Software": None})
