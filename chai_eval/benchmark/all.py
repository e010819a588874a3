"""Every benchmark that leaves rows, one after the other, and one table of what was promised and what was reached."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from chai_eval.benchmark.records import WITH_ROWS, Row, parser, progress, records, rows_of, rows_table
from chai_eval.files import write_whole

# Few repetitions of small shapes: whether everything runs, not how fast.
QUICK = {
    "decode": "--keys 512 --repetitions 3",
    "prefill": "--queries 128 --repetitions 3",
    "low_rank": "--keys 512 --repetitions 3",
    "cache_bytes": "--length 64 --models llama7b --no-process",
    "membership": "--requests 4 --repetitions 3",
    "scoring": "--model smollm2_mha --documents 3 --tasks piqa,boolq --batch-sizes 8 --repetitions 1",
    "model": "--model tiny_llama_random --layers 2 --clusters 3 --lengths 64 --new-tokens 3 --repetitions 3",
}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Run them all and print one table, of the records of earlier runs too."""
    options = parser("all", __doc__)
    options.add_argument("--quick", action="store_true", help="see whether everything runs; its numbers mean nothing")
    options.add_argument("--only", type=_named, default=list(WITH_ROWS), help=f"some of {', '.join(WITH_ROWS)}")
    arguments = options.parse_args(given)
    done = progress("all", arguments)
    for name in arguments.only:
        done.part(name, str, partial(_run, name, arguments))
    rows = recorded(arguments.out)
    print(f"\n{rows_table(rows)}")
    write_whole(arguments.out / "table.md", rows_table(rows))
    done.finish()
    return rows


def recorded(folder: Path) -> list[Row]:
    """Rows of every record in a folder, in the order of the benchmarks."""
    return [row for record in records(folder.glob("*.json")) for row in rows_of(record)]


def _run(name: str, arguments: argparse.Namespace) -> str:
    """In a process of its own: what one leaves of the heap would cost the next one time."""
    print(f"\n{name}\n", flush=True)
    options = [*(QUICK[name].split() if arguments.quick else []), "--out", str(arguments.out)]
    subprocess.run([sys.executable, "-m", "chai_eval.benchmark", name, *options], check=True)
    return name


def _named(text: str) -> list[str]:
    if unknown := sorted({*text.split(",")} - {*WITH_ROWS}):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} given; allowed: {', '.join(WITH_ROWS)}")
    return text.split(",")
