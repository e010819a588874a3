"""What was promised, and what every machine that left records reached of it, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chai_eval.benchmark.records import OWN, PUBLISHED, Row, records, rows_of
from chai_eval.markdown import markdown


def main(given: Sequence[str] | None = None) -> str:
    """Print the table of all records in some folders and in those below them."""
    options = argparse.ArgumentParser("python -m chai_eval benchmark machines", description=__doc__)
    options.add_argument("folders", nargs="*", type=Path, default=[PUBLISHED, OWN], help="published and own by default")
    folders = options.parse_args(given).folders
    found = [record for folder in folders for record in records(folder.rglob("*.json"))]
    if not found:
        options.error(f"folders: no records of benchmarks in {', '.join(map(str, folders))}")
    text = side_by_side(found)
    print(text, end="")
    return text


def side_by_side(found: Sequence[Mapping[str, Any]]) -> str:
    """Rows that have a promise or a limit as Markdown, a column for each machine; the later of what it timed twice."""
    # When it was finished, and the row: by what was timed, and on which machine.
    reached: dict[tuple[str, str, str], dict[str, tuple[str, Row]]] = {}
    for record in found:
        name, finished = machine(record), record["finished"]
        for row in rows_of(record):
            if row.reach is None and row.limit is None:
                continue
            by_machine = reached.setdefault((row.what, row.setting, row.peer), {})
            if name not in by_machine or finished > by_machine[name][0]:
                by_machine[name] = finished, row
    names = list(dict.fromkeys(name for by_machine in reached.values() for name in by_machine))
    lines = []
    for by_machine in reached.values():
        rows = {name: row for name, (_, row) in by_machine.items()}
        about = next(iter(rows.values())).cells({})
        lines.append([*about.values(), *(_cell(rows.get(name)) for name in names)])
    return "\n".join(markdown(["what", "setting", "against", "promised", "limit", *names], lines, left=3)) + "\n"


def machine(record: Mapping[str, Any]) -> str:
    """What a record was made on: `AMD EPYC, AVX512 with bfloat16, 2 threads`, and GPUs where there are any."""
    found = record["machine"]
    low = " with bfloat16" if found.get("multiplies_bfloat16") else ""
    threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
    instructions = f"{found.get('instructions', 'unknown instructions')}{low}"
    return ", ".join([found.get("cpu", "unknown processor"), instructions, threads, *dict.fromkeys(found["gpus"])])


def _cell(row: Row | None) -> str:
    return "–" if row is None else ("missed: " if row.met is False else "") + row.reached.text("×")
