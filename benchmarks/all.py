"""Every benchmark, one after the other, and one table of what was promised and what was reached."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cache_bytes, decode, membership, model, prefill, scoring
from benchmarks.common import RECORDS, Row, table

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


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Run them all and print one table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").strip())
    options.add_argument("--quick", action="store_true", help="see whether everything runs; its numbers mean nothing")
    options.add_argument("--out", type=Path, default=RECORDS, help="folder of the records")
    arguments = options.parse_args(given)
    rows = []
    for each, quick in QUICK.items():
        print(f"\n{each.__name__}\n")
        rows += each.main([*(quick if arguments.quick else []), "--out", str(arguments.out)])
    print(f"\n{table(rows)}")
    return rows


if __name__ == "__main__":
    main()
