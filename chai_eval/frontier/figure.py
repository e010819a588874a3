"""The figure of a frontier: a curve a method, with intervals; what another method dominates is dimmed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pandas as pd

# Okabe and Ito's colours, told apart by the colour-blind; markers tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F", "#999999", "#882255")
MARKERS = "osD^vPX*<>"
DIM = 0.35
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
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The same data give the same file: no date, no random names in it.
    with mpl.rc_context({"svg.hashsalt": "frontier", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 4.6), layout="constrained")
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
        figure.suptitle(f"{title}. Bars: 95 % intervals over sequences; pale: dominated", fontsize=9)
        figure.supxlabel("\n".join(textwrap.wrap(command, WIDTH)), fontsize=6)
        figure.savefig(folder / "frontier.svg", metadata={"Date": None})
        figure.savefig(folder / "frontier.png", dpi=130, metadata={"Software": None})
