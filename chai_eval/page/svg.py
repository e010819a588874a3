"""Figures as files and as part of a page: the same bytes from the same data."""

from __future__ import annotations

import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
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
# The root's width is another thing.
STYLE = re.compile(r' style="(?!min-width)([^"]*)"')
LONG = re.compile(r"-?\d+\.\d{2,}")
REFERENCE = re.compile(r'(?:xlink:href="#|url\(#)([^")]+)')
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
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"<[^>]*>", lambda tag: LONG.sub(_rounded, tag[0]), text)  # not the numbers that are read
    text = _renamed(_ungrouped(re.sub(r"\s+", " ", text).replace("> <", "><")), drawn.name)
    label = f'role="img" aria-label="{escape(drawn.caption, quote=True)}"'
    return text.replace(INK, "currentColor").replace("<svg ", f"<svg {label} ", 1).strip()


def share_styles(figures: Sequence[str]) -> tuple[list[str], str]:
    """Elements whose styles are classes in place of attributes, as most come hundreds of times, and these classes."""
    found = dict.fromkeys(style for figure in figures for style in STYLE.findall(figure))
    names = {style: f"f{number}" for number, style in enumerate(found)}
    shared = [STYLE.sub(lambda match: f' class="{names[match[1]]}"', figure) for figure in figures]
    return shared, "".join(f".{name}{{{style}}}" for style, name in names.items())


def _rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"


def _ungrouped(text: str) -> str:
    """A drawing without groups that say nothing, nor names that nothing refers to."""
    used = set(REFERENCE.findall(text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", text)
    open_groups: list[bool] = []

    def kept(match: re.Match[str]) -> str:
        if match[0] != "</g>":
            open_groups.append(match[0] != "<g>")
        return match[0] if (open_groups[-1] if match[0] != "</g>" else open_groups.pop()) else ""

    return re.sub(r"</?g\b[^>]*>", kept, text)


def _renamed(text: str, name: str) -> str:
    """A drawing whose identifiers no other of the page has: short ones, as there are thousands of references."""
    own = f"{zlib.crc32(name.encode()):x}"
    for number, each in enumerate(dict.fromkeys(REFERENCE.findall(text))):
        text = re.sub(rf'(id="|xlink:href="#|url\(#){re.escape(each)}(?=["\)])', rf"\g<1>i{own}-{number}", text)
    return text


def save(drawn: Drawn, folder: Path) -> None:
    """Write `<name>.svg` and `<name>.png`, with caption and command below; after `on_page`, whose figure it changes."""
    with drawing(drawn.name):
        lines = [*textwrap.wrap(drawn.caption, WIDTH), *textwrap.wrap(drawn.command, WIDTH)]
        drawn.figure.text(0.01, -0.02, "\n".join(lines), fontsize=6, va="top")
        for end, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            save_as = partial(drawn.figure.savefig, format=end, metadata=metadata, bbox_inches="tight")
            write_whole(folder / f"{drawn.name}.{end}", save_as)
