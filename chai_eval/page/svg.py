"""Figures as files and as part of a page: the same bytes from the same data."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from chai_eval.files import write_whole
from chai_eval.page.figures import Drawn

# What text, axes and one of the curves are drawn in: on a page, the colour of its text.
INK = "#000000"
# Characters of a line below a figure.
WIDTH = 120


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Settings of matplotlib while figures are drawn and saved: no names that differ from run to run."""
    import matplotlib as mpl

    own: dict[Any, Any] = {
        "svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "font.family": "DejaVu Sans", "savefig.dpi": 130,
    }  # fmt: skip
    with mpl.rc_context({**mpl.rcParamsDefault, **own}):
        yield


def on_page(drawn: Drawn) -> str:
    """A figure as an `svg` element that takes the page's width and the colour of its text."""
    with drawing(drawn.name):
        buffer = BytesIO()
        drawn.figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt"', r'\1 style="min-width:min(\2pt,34rem)"', text, count=1)
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda match: _own(match, used, drawn.name), text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{drawn.name}-", text)
    label = f'role="img" aria-label="{escape(drawn.caption, quote=True)}"'
    return text.replace(INK, "currentColor").replace("<svg ", f"<svg {label} ", 1).strip()


def _own(match: re.Match[str], used: set[str], name: str) -> str:
    """An identifier that no other figure of the page has; none where nothing refers to it."""
    return f' id="{name}-{match[1]}"' if match[1] in used else ""


def save(drawn: Drawn, folder: Path) -> None:
    """Write `<name>.svg` and `<name>.png`, with caption and command below; after `on_page`, whose figure it changes."""
    with drawing(drawn.name):
        lines = [*textwrap.wrap(drawn.caption, WIDTH), *textwrap.wrap(drawn.command, WIDTH)]
        drawn.figure.text(0.01, -0.02, "\n".join(lines), fontsize=6, va="top")
        for end, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            save_as = partial(drawn.figure.savefig, format=end, metadata=metadata, bbox_inches="tight")
            write_whole(folder / f"{drawn.name}.{end}", save_as)
