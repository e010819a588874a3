"""Kill a run with SIGKILL at random moments, start it again each time, and compare with a run that was left alone.

    python tests/kill_and_resume.py --kills 20

A run is three tasks on a tiny random model. Children are forked from a process that has everything imported, so that
a try takes tenths of a second. Exits 0 when every record and every sample is equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked process has none of its parent's threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pandas as pd

from chai_eval.cli import main
from chai_eval.store.record import read_record, read_samples

# What a run imports as it goes, imported before the first fork.
for late in ("chai_eval.run", "chai_eval.cli.launch", "chai_eval.scoring.fidelity", "transformers.models.llama"):
    importlib.import_module(late)

# What may differ between two runs of the same result.
APART = ("wall_seconds", "finished", "config")


def write_documents(folder: Path, count: int) -> None:
    """Write documents of three of the paper's tasks, made up, in the hub's columns."""
    draw = random.Random(0)
    words = (
        "the",
        "head",
        "of",
        "a",
        "cat",
        "sat",
        "on",
        "every",
        "mat",
        "that",
        "nobody",
        "put",
        "there",
        "by",
        "noon",
    )

    def text(length: int) -> str:
        return " ".join(draw.choice(words) for _ in range(length))

    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, object]]] = {"piqa": [], "boolq": [], "arc_easy": []}
    for index in range(count):
        right = draw.randrange(2)
        rows["piqa"].append({"goal": text(7), "sol1": text(5), "sol2": text(4), "label": right})
        rows["boolq"].append({"passage": f"{text(3)} -- {text(20)}", "question": text(6), "label": right})
        choices = {"text": [text(3) for _ in range(4)], "label": list("ABCD")}
        rows["arc_easy"].append(
            {"id": str(index), "question": text(9), "choices": choices, "answerKey": "ABCD"[draw.randrange(4)]}
        )
    for task, lines in rows.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def arguments(documents: Path, results_dir: Path, tasks: str = "piqa,boolq,arc_easy") -> list[str]:
    """What a user would type; a small token budget makes many batches, and many moments to be killed at."""
    return [
        "model=tiny_llama_random",
        f"task=[{tasks}]",
        f"data_dir={documents}",
        f"results_dir={results_dir}",
        "limit=null",
        "batch_tokens=64",
        "device=cpu",
    ]


def start(given: list[str]) -> int:
    """Fork a process that runs the command line; return its id."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(main(given))
    return child


def run_alone(given: list[str], results_dir: Path) -> tuple[float, float]:
    """Run to the end; return the seconds until the first request was scored, and from there to the end."""
    began = time.monotonic()
    first = None
    child = start(given)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if first is None and (ended or next(results_dir.glob("*/*/*/journal.jsonl"), None)):
            first = time.monotonic()
        if ended:
            break
        time.sleep(0.01)
    if status != 0:
        raise SystemExit(f"a run that was left alone ended with status {os.waitstatus_to_exitcode(status)}")
    assert first is not None
    return first - began, time.monotonic() - first


def results(results_dir: Path) -> dict[str, tuple[object, list[list[dict[str, object]]]]]:
    """Every finished result: its record without what may differ, and its samples and fidelity to the last bit."""
    found = {}
    for path in sorted(results_dir.glob("*/*/*/record.json")):
        record = read_record(path.parent) or {}
        tables = [read_samples(path.parent), *map(pd.read_parquet, path.parent.glob("fidelity.parquet"))]
        samples = [json.loads(each.to_json(orient="records", double_precision=15)) for each in tables]
        kept = {name: value for name, value in record.items() if name not in APART}
        found[str(path.parent.relative_to(results_dir))] = (kept, samples)
    return found


def kill_and_compare(folder: Path, kills: int, seed: int) -> str:
    """Do it; return what happened, or raise SystemExit."""
    draw = random.Random(seed)
    documents = folder / "documents"
    write_documents(documents, 60)
    until_first, scoring = run_alone(arguments(documents, folder / "alone"), folder / "alone")
    broken = arguments(documents, folder / "broken")
    hit = 0
    for _ in range(kills):
        child = start(broken)
        # Each start gets on by its share of the scoring, so that the last kill still finds something to interrupt.
        time.sleep(draw.uniform(0.5 * until_first, until_first + 1.5 * scoring / kills))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        hit += os.WIFSIGNALED(status)
    run_alone(broken, folder / "broken")
    expected, got = results(folder / "alone"), results(folder / "broken")
    differing = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    if differing or not expected:
        raise SystemExit(f"after {hit} kills these differ from a run left alone: {differing or 'all are missing'}")
    return f"{hit} of {kills} kills hit; {len(expected)} results equal those of a run left alone"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(kill_and_compare(Path(folder), given.kills, given.seed) + "\n")
