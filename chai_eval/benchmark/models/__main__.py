"""Which models methods can be put into: every causal type of transformers, small, judged against the stock model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from chai_eval.benchmark.common import positive
from chai_eval.benchmark.models.build import kinds
from chai_eval.benchmark.models.page import page
from chai_eval.benchmark.models.sweep import sweep
from chai_eval.benchmark.models.verdict import BAD, Verdict

PAGE = Path("docs/models.md")


def main(given: Sequence[str] | None = None) -> list[Verdict]:
    """Judge them all, write the page, and end with 1 where one is wrong."""
    options = argparse.ArgumentParser(prog="python -m chai_eval.benchmark.models", description=(__doc__ or "").strip())
    options.add_argument("kinds", nargs="*", metavar="type", help="model types; all of the installed transformers")
    options.add_argument("--processes", type=positive, default=2, help="types judged at once, on one thread each")
    options.add_argument("--seconds", type=positive, default=180, help="time that one type may take")
    options.add_argument("--out", type=Path, default=None, help=f"page to write; of all types {PAGE.name} in docs")
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
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(found), encoding="utf-8")
        print(f"written to {out}")
    return found


if __name__ == "__main__":
    raise SystemExit(int(any(each.verdict in BAD for each in main())))
