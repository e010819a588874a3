"""Rows of benchmarks, the records that they stand in, and their options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from chai_eval.benchmark.promises import promised
from chai_eval.checksum import DamagedError, read_document, write_document
from chai_eval.errors import RunError
from chai_eval.markdown import table
from chai_eval.measure.progress import Progress
from chai_eval.measure.serialise import from_json, to_json
from chai_eval.measure.statistics import Ratio

# What this machine gave, and what was published of others: two places, so that running a benchmark changes no figure
# that stands in the README.
OWN, PUBLISHED = Path("results/benchmarks"), Path("results/records/benchmarks")
# Those that leave rows, in the order of tables.
WITH_ROWS = ("decode", "prefill", "low_rank", "cache_bytes", "membership", "scoring", "model")


@dataclass(frozen=True)
class Row:
    """One line of the table: what is measured, at which shape, against what, and how many times as good it is.

    `limit` is the most that operations and bytes allow; `details` are raw samples and whatever belongs to the record.
    """

    what: str
    setting: str
    peer: str
    reached: Ratio
    limit: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reach(self) -> float | None:
        """What is promised; None where nothing is."""
        return promised(self.what, self.setting, self.limit)

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none."""
        return None if self.reach is None else self.reached.value >= self.reach

    def cells(self, reached: Mapping[str, str]) -> dict[str, str]:
        """A line of a table: what it is and what is promised, about what was reached."""
        return {
            "what": self.what, "setting": self.setting, "against": self.peer, **reached,
            "promised": "–" if self.reach is None else f"≥ {self.reach:.2f}×",
            "limit": "–" if self.limit is None else f"{self.limit:.2f}×",
        }  # fmt: skip


def rows_table(rows: Sequence[Row]) -> str:
    """Rows beside their promises and limits, as Markdown."""
    lines = [
        {
            **row.cells({"reached": f"{row.reached.value:.2f}×", "95 %": row.reached.spread}),
            "of limit": "–" if row.limit is None else f"{100 * row.reached.value / row.limit:.1f} %",
            "met": {None: "–", True: "yes", False: "NO"}[row.met],
        }
        for row in rows
    ]
    return table(lines, left=3)


def parser(name: str, about: str | None, *, repetitions: int | None = None, out: Path = OWN) -> argparse.ArgumentParser:
    """Options of a benchmark; `repetitions` and `device` where it times something."""
    options = argparse.ArgumentParser(f"python -m chai_eval benchmark {name}", description=(about or "").split("\n")[0])
    if repetitions is not None:
        options.add_argument("--repetitions", type=positive, default=repetitions, help="timed repetitions")
        options.add_argument("--device", default="cpu", help="cpu, cuda …")
    options.add_argument("--out", type=writable, default=out, help="folder of the records")
    return options


def text_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Options of a comparison on text; its records have a folder of their own."""
    options = parser(name, about, out=Path("results") / name)
    options.add_argument("--model", default="smollm2_mha")
    options.add_argument(
        "--text", required=True, help="text that no calibration has seen: a file, stdlib, kmmlu, chat, c4, passages"
    )
    options.add_argument("--seed", type=int, default=99, help="order of the text")
    options.add_argument("--sequences", type=positive, default=64, help="whose divergence is taken")
    return options


def progress(name: str, arguments: argparse.Namespace) -> Progress:
    """What an interrupted run of the same benchmark, with the same options on the same machine, has left."""
    asked = {key: value for key, value in vars(arguments).items() if key != "out"}
    return Progress(arguments.out / f"{name}.parts", {"options": asked, **provenance()})


def finish(done: Progress, rows: Sequence[Row], **more: Any) -> list[Row]:
    """Print the table and write the record beside its parts, which are forgotten."""
    assert done.folder is not None
    record = done.folder.with_suffix(".json")
    print(rows_table(rows))
    found = [{**to_json(row), "reach": row.reach, "met": row.met} for row in rows]
    write(record.stem, record, {"rows": found, **more})
    done.finish()
    return list(rows)


def write(name: str, path: Path, content: Mapping[str, Any]) -> None:
    """Write the record of a benchmark: what it found, and on which machine."""
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    write_document(path, {"benchmark": name, **content, **provenance(), "finished": finished}, files={})
    print(f"written to {path}")


def provenance() -> dict[str, Any]:
    """Threads, versions, revision and machine, as far as this machine can tell them."""
    threads = torch.get_num_threads()
    try:
        from chai_eval.store.provenance import git_revision, machine, versions
    except ImportError:  # a machine with torch and transformers alone
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return {"threads": threads, "versions": {"torch": torch.__version__}, "machine": {"gpus": gpus}}
    return {"threads": threads, "versions": versions(), "git": git_revision(), "machine": machine()}


def records(files: Iterable[Path]) -> list[dict[str, Any]]:
    """What benchmarks wrote, in their order, of each those in folders below later; RunError for a damaged one."""

    def place(file: Path) -> tuple[int, int, str]:
        return WITH_ROWS.index(_benchmark(file)), len(file.parts), file.as_posix()

    in_order = sorted((file for file in files if _benchmark(file) in WITH_ROWS), key=place)
    try:
        return [read_document(file).content for file in in_order]
    except DamagedError as error:
        raise RunError(f"{error}; move it away, its benchmark makes another") from error


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """Rows of a record."""
    return from_json(list[Row], record["rows"])


def file_name(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.]+", "-", text)


def numbers(text: str) -> list[int]:
    """`2048,4096` as numbers."""
    return [positive(each) for each in text.split(",")]


def positive(text: str) -> int:
    """`64` as a number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} given; allowed: whole numbers from 1")
    return value


def writable(text: str) -> Path:
    """A folder for records, made where it isn't there: a benchmark shouldn't run for minutes and then find it can't."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} given, which can't be made ({error.strerror}); allowed: a folder that can be written to"
        ) from error
    return folder


def _benchmark(record: Path) -> str:
    """Which benchmark a record is of, by the name of its file."""
    return record.stem.partition("-")[0]
