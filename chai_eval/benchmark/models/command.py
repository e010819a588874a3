"""Which models methods can be put into: every causal type of transformers, small, judged against the stock model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from chai_eval.benchmark.models.build import kinds
from chai_eval.benchmark.models.page import page
from chai_eval.benchmark.models.sweep import sweep
from chai_eval.benchmark.models.verdict import BAD, Verdict
from chai_eval.benchmark.records import positive
from chai_eval.files import write_whole

PAGE = Path("docs/models.md")


def main(given: Sequence[str]) -> int:
    """Judge as `judged` does; 1 where a type is wrong."""
    return int(any(each.verdict in BAD for each in judged(given)))


def judged(given: Sequence[str]) -> list[Verdict]:
    """Judge all types that are given, and write the page."""
    options = argparse.ArgumentParser("python -m chai_eval benchmark models", description=__doc__)
    options.add_argument("kinds", nargs="*", metavar="type", help="model types; all of the installed transformers")
    options.add_argument("--processes", type=positive, default=2, help="types judged at once, on one thread each")
    options.add_argument("--seconds", type=positive, default=180, help="time that one type may take")
    options.add_argument("--out", type=Path, default=None, help=f"page to write; of all types {PAGE}")
    arguments = options.parse_args(given)
    if unknown := sorted({*arguments.kinds} - {*kinds()}):
        options.error(f"type: {', '.join(unknown)} given; allowed: causal types of the installed transformers")
    start, found = time.perf_counter(), []
    for each in sweep(arguments.kinds or kinds(), processes=arguments.processes, seconds=arguments.seconds):
        found.append(each)
        print(f"{each.kind}: {each.summary}", flush=True)
    print(f"{len(found)} types in {time.perf_counter() - start:.0f} s")
    out = arguments.out or (None if arguments.kinds else PAGE)
    if out is not None:
        write_whole(out, page(found))
        print(f"written to {out}")
    return found
