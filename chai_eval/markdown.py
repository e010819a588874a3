"""Markdown tables with aligned columns: what pipes, records and machines with nothing else installed get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 2) -> list[str]:
    """Lay out a Markdown table with aligned columns, the first `left` of them left-aligned."""
    widths = [max(3, *(len(row[index]) for row in (columns, *lines))) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return [line(columns), line(rule), *(line(row) for row in lines)]


def table(lines: Sequence[Mapping[str, str]], *, left: int = 1) -> str:
    """A Markdown table of lines that have the same columns."""
    return "\n".join(markdown(list(lines[0]), [list(each.values()) for each in lines], left=left)) + "\n"
