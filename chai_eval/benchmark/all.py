"""Every benchmark, one after the other, and one table of what was promised and what was reached."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from chai_eval.benchmark import cache_bytes, decode, membership, model, prefill, scoring
from chai_eval.benchmark.common import OWN, Row, table, writable
from chai_eval.checksum import DamagedError, read_document
from chai_eval.measure.statistics import Ratio

# Few repetitions of small shapes: whether everything runs, not how fast.
QUICK = {
    decode: ["--keys", "512", "--repetitions", "3"],
    prefill: ["--queries", "128", "--repetitions", "3"],
    cache_bytes: ["--length", "64", "--models", "llama7b", "--no-process"],
    membership: ["--requests", "4", "--repetitions", "3"],
    scoring: [
        "--model",
        "smollm2_mha",
        "--documents",
        "3",
        "--tasks",
        "piqa,boolq",
        "--batch-sizes",
        "8",
        "--repetitions",
        "1",
    ],
    model: [
        "--model",
        "tiny_llama_random",
        "--layers",
        "2",
        "--clusters",
        "3",
        "--lengths",
        "64",
        "--new-tokens",
        "3",
        "--repetitions",
        "3",
    ],
}
NAMES = {each.__name__.rpartition(".")[2]: each for each in QUICK}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Run them all and print one table, of the records of earlier runs too."""
    options = argparse.ArgumentParser(description=(__doc__ or "").strip())
    options.add_argument("--quick", action="store_true", help="see whether everything runs; its numbers mean nothing")
    options.add_argument("--only", type=_named, default=list(QUICK), help=f"some of {', '.join(NAMES)}")
    options.add_argument("--out", type=writable, default=OWN, help="folder of the records and of the table")
    arguments = options.parse_args(given)
    for each in arguments.only:
        print(f"\n{each.__name__}\n", flush=True)
        options_of = [*(QUICK[each] if arguments.quick else []), "--out", str(arguments.out)]
        # A process each: what one leaves of the heap would cost the next one time.
        subprocess.run([sys.executable, "-m", each.__name__, *options_of], check=True)
    rows = recorded(arguments.out)
    print(f"\n{table(rows)}")
    (arguments.out / "table.md").write_text(table(rows), encoding="utf-8")
    return rows


def recorded(folder: Path) -> list[Row]:
    """Rows of every record in a folder, in the order of the benchmarks."""
    return [row for record in records(folder.glob("*.json")) for row in rows_of(record)]


def records(files: Iterable[Path]) -> list[dict[str, Any]]:
    """What benchmarks wrote, in their order; of one benchmark what lies in folders below comes later."""
    names = list(NAMES)

    def place(file: Path) -> tuple[int, int, str]:
        return names.index(_benchmark(file)), len(file.parts), file.as_posix()

    in_order = sorted((file for file in files if _benchmark(file) in NAMES), key=place)
    try:
        return [read_document(file).content for file in in_order]
    except DamagedError as error:
        raise SystemExit(f"{error}; move it away, its benchmark makes another") from error


def _benchmark(record: Path) -> str:
    """Which benchmark a record is of, by the name of its file."""
    return record.stem.partition("-")[0]


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """Rows of a record as they were when it was written."""
    kept = {each.name for each in fields(Row)}
    return [Row(**{key: row[key] for key in kept} | {"reached": Ratio(**row["reached"])}) for row in record["rows"]]


def _named(text: str) -> list[Any]:
    if unknown := sorted({*text.split(",")} - NAMES.keys()):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} given; allowed: {', '.join(NAMES)}")
    return [NAMES[each] for each in text.split(",")]


if __name__ == "__main__":
    main()
