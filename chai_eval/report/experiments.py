"""What experiments found, as tables of a report: the data beside each one's record, column by column."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from chai_eval.report.columns import Column, Line, Table
from chai_eval.report.records import Records, Stored

# Lines that a page shows; more are data for a figure, and stay in the file.
MOST_LINES = 200
QUICK = "A quick look, of far fewer documents, texts or points than the experiment has."


def experiment_tables(records: Records) -> list[Table]:
    """A table an experiment: those with at most `MOST_LINES` lines of data."""
    found = [_table(each) for each in records.experiments if 0 < len(each.tables.get("data", ())) <= MOST_LINES]
    return sorted(found, key=lambda each: each.name)


def _table(found: Stored) -> Table:
    content, data = found.content, found.tables["data"]
    model = content["model"]["name"]
    data = data.drop(columns=["quick"], errors="ignore").dropna(axis="columns", how="all")
    name = "experiment-" + re.sub(r"[^A-Za-z0-9]+", "-", f"{content['experiment']}-{model}")
    said = " ".join([f"{content['title']}, on {model}.", *([QUICK] if content["quick"] else [])])
    columns = [_column(str(title), data[title]) for title in data]
    lines: list[dict[str, Any]] = [
        {"model": model, **{str(key): None if pd.isna(value) else value for key, value in line.items()}}
        for line in data.astype(object).to_dict("records")
    ]
    return Table(name + ("-quick" if content["quick"] else ""), said, columns, lines)


def _column(title: str, values: pd.Series[Any]) -> Column:
    number = bool(pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))

    def show(line: Line) -> str:
        value = line[title]
        return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return Column(title.replace("_", " "), title, show, number)
