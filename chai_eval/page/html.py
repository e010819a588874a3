"""The page: one HTML file that opens without a network, from templates that escape whatever they are given."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from chai_eval.page.figures import Drawn
from chai_eval.report.changed import Changes
from chai_eval.report.columns import Table
from chai_eval.report.decision import Decision, scores_text
from chai_eval.report.heads import Heads
from chai_eval.report.ranking import Ranked
from chai_eval.report.sources import named
from chai_eval.report.verdicts import INCONSISTENT

TEMPLATES = Path(__file__).parent / "templates"
FILTERS = ("model", "method", "task")


@dataclass(frozen=True)
class Content:
    """What a page shows; `figures` with each figure's `svg` element."""

    decisions: Sequence[Decision]
    claims: Table
    tables: Sequence[Table]
    records: Table
    figures: Sequence[tuple[Drawn, str]]
    figures_missing: str | None
    changes: Sequence[Changes]
    heads: Sequence[Heads]
    left_out: Sequence[str]
    command: str


def page(content: Content) -> str:
    """The page as text; the same content gives the same text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["zip"] = lambda one, other: zip(one, other, strict=True)
    environment.globals.update(
        tags=_tags, raw=_raw, named=named, scores_text=scores_text, strip=_strip, strip_ends=_strip_ends
    )
    css, script = ((TEMPLATES / name).read_text(encoding="utf-8").strip() for name in ("style.css", "script.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        environment.get_template("page.html.j2")
        .render(
            **{name: value for name, value in vars(content).items() if name != "figures"},
            figures=[(drawn, Markup(svg)) for drawn, svg in content.figures],
            filters=_choices([content.claims, content.records, *content.tables]),
            parts=_parts(content),
            inconsistent=INCONSISTENT,
            css=Markup(css),
            script=Markup(script),
            script_hash=f"sha256-{digest}",
        )
        .lstrip()
    )


def _parts(content: Content) -> list[tuple[str, str]]:
    there = {
        "claims": bool(content.claims.lines), "figures": bool(content.figures), "tables": True,
        "changed": bool(content.changes), "heads": bool(content.heads), "records": True,
    }  # fmt: skip
    return [(name, name) for name, shown in there.items() if shown]


def _choices(tables: Iterable[Table]) -> list[tuple[str, list[str]]]:
    """What can be chosen in each filter: every model, method and task of any table."""
    lines = [line for table in tables for line in table.lines]
    return [(name, sorted({value for line in lines if (value := _value(line, name))})) for name in FILTERS]


def _value(line: Mapping[str, Any], name: str) -> str:
    """A line's model, method or task; of a method its name, without settings."""
    value = str(line.get(name) or "")
    return value.partition(",")[0] if name == "method" else value


def _tags(line: Mapping[str, Any]) -> Markup:
    """What a line is filtered by, as attributes."""
    given = [(name, _value(line, name)) for name in FILTERS]
    return Markup("").join(Markup(' data-{}="{}"').format(name, value) for name, value in given if value)


def _raw(value: Any) -> str:
    """A value to be sorted by; nothing for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return "Infinity" if value == math.inf else f"{value:.6g}" if isinstance(value, float) else str(value)


def _ends(decision: Decision) -> tuple[float, float]:
    """Whole powers of ten around all of a ranking's losses, as exponents."""
    assert decision.ranking is not None
    found = [each.loss.kl for each in decision.ranking.places]
    finite = [end for kl in found for end in kl if math.isfinite(end) and end > 0]
    low, high = (math.log10(each) for each in (min(finite, default=0.1), max(finite, default=1.0)))
    return math.floor(low), max(math.ceil(high), math.floor(low) + 1)


def _strip_ends(decision: Decision) -> tuple[str, str]:
    low, high = _ends(decision)
    return f"{10.0**low:g}", f"{10.0**high:g}"


def _strip(decision: Decision, each: Ranked) -> Markup:
    """A method's loss and its interval on the scale of the ranking, as a small drawing."""
    low, high = _ends(decision)

    def at(value: float) -> str:
        place = (math.log10(value) - low) / (high - low) if value > 0 and math.isfinite(value) else 0.0
        return f"{100 * min(max(place, 0.0), 1.0):.1f}"

    value, below, above = each.loss.kl
    line = Markup("")
    if math.isfinite(above):
        line = Markup('<line x1="{}%" x2="{}%" y1="50%" y2="50%" stroke="currentColor" stroke-width="2"/>').format(
            at(below), at(above)
        )
    dot = Markup('<circle cx="{}%" cy="50%" r="4" fill="currentColor"/>').format(at(value))
    return Markup('<svg class="strip" aria-hidden="true">{}{}</svg>').format(line, dot)
