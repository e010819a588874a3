"""What all benchmarks share: turns, ratios, rows of the table, records."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from chai_eval.checksum import sealed
from chai_eval.markdown import markdown
from chai_eval.measure.clock import clock_for
from chai_eval.measure.latency import undisturbed
from chai_eval.measure.statistics import Ratio, ratio
from chai_eval.measure.turns import turns

RESULTS = Path("results")
# What this machine gave, and what was published of others: two places, so that running a benchmark changes no figure
# that stands in the README.
OWN, PUBLISHED = RESULTS / "benchmarks", RESULTS / "records" / "benchmarks"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    what, setting, peer : str
        What is measured, at which shape, against what.
    reached : Ratio
        How many times as good as the peer; above 1 is better.
    reach : float or None
        What is promised.
    limit : float or None
        The most that operations and bytes allow.
    details : mapping
        Raw samples and whatever belongs to the record.
    """

    what: str
    setting: str
    peer: str
    reached: Ratio
    reach: float | None = None
    limit: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none."""
        return None if self.reach is None else self.reached.value >= self.reach


def parser(text: str | None, *, repetitions: int) -> argparse.ArgumentParser:
    """Options of every benchmark."""
    options = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    options.add_argument("--repetitions", type=positive, default=repetitions, help="timed repetitions")
    options.add_argument("--device", default="cpu", help="cpu, cuda …")
    options.add_argument("--out", type=writable, default=OWN, help="folder of the records")
    return options


def in_turn(
    contenders: Mapping[str, Callable[[], object]], device: torch.device, *, repetitions: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each contender by repetition, each having its turn in every one; warm-up is discarded."""
    clock = clock_for(device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with undisturbed(), torch.inference_mode():
        for repetition in range(-warmup, repetitions):
            for name in turns(list(contenders), repetition):
                start = clock.mark()
                contenders[name]()
                taken = clock.seconds(start, clock.mark())
                if repetition >= 0:
                    seconds[name].append(taken)
    return seconds


def compared(seconds: Mapping[str, Sequence[float]], peer: str, ours: str) -> Ratio:
    """How many times as fast as the peer we are."""
    return ratio(seconds[peer], seconds[ours])


def table(rows: Sequence[Row]) -> str:
    """Rows beside their limits, as Markdown."""
    columns = ["what", "setting", "against", "reached", "95 %", "promised", "limit", "of limit", "met"]
    lines = []
    for row in rows:
        found = row.reached
        lines.append(
            [
                row.what,
                row.setting,
                row.peer,
                f"{found.value:.2f}×",
                spread(found),
                promised(row),
                limit(row),
                "–" if row.limit is None else f"{100 * found.value / row.limit:.1f} %",
                "–" if row.met is None else "yes" if row.met else "NO",
            ]
        )
    return "\n".join(markdown(columns, lines, left=3)) + "\n"


def spread(found: Ratio) -> str:
    """The 95 % interval of a ratio, or a dash."""
    return "–" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"


def promised(row: Row) -> str:
    """What is promised, or a dash."""
    return "–" if row.reach is None else f"≥ {row.reach:.2f}×"


def limit(row: Row) -> str:
    """What operations and bytes allow, or a dash."""
    return "–" if row.limit is None else f"{row.limit:.2f}×"


def write(name: str, rows: Sequence[Row], folder: Path, **more: Any) -> Path:
    """Write the record of a benchmark: its rows with their raw samples, and the machine."""
    record = {
        "benchmark": name,
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        **more,
        "threads": torch.get_num_threads(),
        **provenance(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    plain = json.loads(json.dumps(record, default=str))
    path.write_text(json.dumps(sealed(plain, {}), indent=1) + "\n", encoding="utf-8")
    return path


def provenance() -> dict[str, Any]:
    """Versions, revision and machine, as far as this machine can tell them."""
    try:
        from chai_eval.store.provenance import git_revision, machine, versions
    except ImportError:  # a machine with torch and transformers alone
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return {"versions": {"torch": torch.__version__}, "machine": {"gpus": gpus}}
    return {"versions": versions(), "git": git_revision(), "machine": machine()}


def finish(name: str, rows: Sequence[Row], arguments: argparse.Namespace, **more: Any) -> list[Row]:
    """Print the table and write the record."""
    print(table(rows))
    print(f"written to {write(name, rows, arguments.out, **more)}")
    return list(rows)


def copies_beyond_caches(nbytes: int) -> int:
    """How many layers' worth of tensors are taken in turn, so that none is still in a processor's cache."""
    return max(1, math.ceil((1 << 28) / nbytes))


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
