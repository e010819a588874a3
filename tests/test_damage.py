"""One bit flipped in any kind of file: what is read is what was written, or one line says that it is damaged.

    CHAI_EVAL_FLIPS=2000 python -m pytest tests/test_damage.py

flips as many bits of each.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from chai_eval.benchmark.records import records
from chai_eval.calibration.collect import Collected
from chai_eval.calibration.progress import SavedProgress
from chai_eval.calibration.sums import HeadStatistics
from chai_eval.calibration_file import calibration, write_calibration
from chai_eval.checksum import sealed
from chai_eval.data.assets import fetch
from chai_eval.errors import RunError, SettingError
from chai_eval.methods import clusters
from chai_eval.store.folder import ResultFolder
from chai_eval.store.journal import Journal
from chai_eval.store.record import read_fidelity, read_record, read_samples, write_fidelity, write_record
from chai_eval.store.status import list_measurements, list_results
from tests.data.fake_wheels import fake_asset, write_wheel

FLIPS = int(os.environ.get("CHAI_EVAL_FLIPS", "60"))

NOTHING = object()


@dataclass(frozen=True)
class Kind:
    """A file, and how what it holds gets into a run.

    Attributes
    ----------
    path : Path
    read : callable
        Gives what a run would take from the file, or `NOTHING` where it makes that anew.
    checked : bool
        Whether the file has a checksum.
    """

    path: Path
    read: Callable[[], Any]
    checked: bool = True


def numbers(count: int) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    pairs = draw.normal(size=(count, 2))
    return pd.DataFrame(
        {"doc_id": range(count), "loglikelihoods": list(pairs), "acc": (pairs[:, 0] > 0).astype(float), "hash": "9f"}
    )


def as_text(table: pd.DataFrame) -> str:
    return table.to_json(orient="split", double_precision=15) + str(table.dtypes.to_dict())


def result(folder: Path) -> ResultFolder:
    found = ResultFolder(folder, "tiny", "piqa", "chai", "0123456789ab")
    metrics = {"acc": {"value": 2 / 3, "stderr": 0.0125}, "acc_norm": {"value": 1e-5, "stderr": None}}
    record = {"key": found.key, "n_documents": 12, "metrics": metrics, "config": {"seed": 0, "counts": [[9, 17]]}}
    write_record(found.path, record, numbers(12))
    write_fidelity(found.path, {"asked": 5, "documents": 4, "divergence": {"value": 0.1 + 0.2}}, numbers(4))
    return found


def without_checksums(path: Path) -> None:
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({name: each for name, each in whole.items() if name not in ("files", "checksum")}))


def results_file(folder: Path, name: str, *, checked: bool = True) -> Kind:
    path = result(folder).path
    if not checked:
        without_checksums(path / "record.json")

    def fidelity() -> str | None:
        found = read_fidelity(path, 3)
        return None if found is None else as_text(found)

    read = {
        "record.json": lambda: read_record(path),
        "samples.parquet": lambda: as_text(read_samples(path)),
        "fidelity.parquet": fidelity,
    }
    return Kind(path / name, read[name], checked)


def listed_result(folder: Path, name: str) -> Kind:
    """A file as `status` reads it."""
    path = result(folder).path
    return Kind(path / name, lambda: _listed([(each.state, each.detail) for each in list_results(folder)]))


def note(folder: Path, name: str) -> Kind:
    """A note on an attempt, from which no number of a result comes."""
    found = ResultFolder(folder, "tiny", "piqa", "chai", "0123456789ab")
    found.begin({"n_requests": 40})
    found.fail("logits are not finite")
    return Kind(
        found.path / name, lambda: _listed([(each.state, each.detail) for each in list_results(folder)]), checked=False
    )


def measurement(folder: Path, name: str) -> Kind:
    path = folder / "tiny" / "measure" / "0123456789ab"
    points = [{"batch": 1, "results": {"chai": {"ttft": 0.125}}}]
    config = {"measure": {"kind": "latency"}}
    described = {"kind": "measure", "contenders": [{"name": "chai"}], "points": points, "config": config}
    write_record(path, described, numbers(9))

    def read() -> Any:
        listed = _listed([(each.state, each.detail) for each in list_measurements(folder)])
        return listed, read_record(path), as_text(read_samples(path))

    return Kind(path / name, read)


def _listed(found: list[tuple[str, str]]) -> Any:
    ((state, detail),) = found
    if state == "unreadable" or ".parquet not readable" in detail:
        raise RunError(detail)
    return state, detail


def calibration_file(folder: Path, name: str, *, checked: bool = True) -> Kind:
    made = folder / "calibration" / "tiny"
    counts = {"balanced": {"clusters": [[3, 2], [2, 1]], "kv_saving": 0.14}}
    tensors = {"head_importance": torch.randn(3, 4), "output_aware.balanced": torch.arange(12).view(3, 4)}
    write_calibration(made, {"layout": 1, "model": {"name": "tiny", "layers": 3}, "presets": counts}, tensors)
    if not checked:
        without_checksums(made / "calibration.json")

    def read() -> Any:
        found = calibration(str(made))
        runs = clusters.preset_runs("tiny-balanced")
        return found.description, found.sha256, runs, [found.tensor(each).tolist() for each in tensors]

    return Kind(made / name, read, checked)


def asset_file(folder: Path, name: str) -> Kind:
    """Of an asset whose wheel lies in the cache, so that it can be unpacked again."""
    asset = fake_asset(write_wheel(folder))
    return Kind(fetch(asset) / name, lambda: (fetch(asset) / "text.txt").read_text())


def progress(folder: Path) -> Kind:
    saved = Collected(HeadStatistics({"error": torch.rand(2, 4)}), None, sha256="abc")
    SavedProgress(folder / "sums.pt").save(saved.state())
    (path,) = folder.glob("sums-*.pt")

    def read() -> Any:
        state = SavedProgress(folder / "sums.pt").load()
        if state is None:
            return NOTHING
        found = Collected(HeadStatistics(), None)
        found.resume(state)
        return {name: each.tolist() for name, each in found.sums.sums.items()}, found.sha256

    return Kind(path, read)


def sensitivity(folder: Path) -> Kind:
    saved = SavedProgress(folder / "sensitivity.pt")
    saved.save({"samples": torch.tensor([[[[0.1, 0.25], [1e-7, 3.0]]]], dtype=torch.float64)})
    (path,) = folder.glob("sensitivity-*.pt")

    def read() -> Any:
        state = saved.load()
        return NOTHING if state is None else state["samples"].tolist()

    return Kind(path, read)


def benchmark(folder: Path) -> Kind:
    path = folder / "decode.json"
    path.write_text(json.dumps(sealed({"benchmark": "decode", "rows": [{"reached": 1.75}], "threads": 2}, {})))

    return Kind(path, lambda: records([path]))


def journal(folder: Path) -> Kind:
    """Whose lines have checksums of their own: one that is damaged is scored again."""
    path = folder / "journal.jsonl"
    scored = {f"request-{index}": [-(1 / 3) * index, index % 2 == 0] for index in range(9)}
    with Journal(path) as opened:
        opened.append_many(scored.items())

    def read() -> Any:
        kept = dict(Journal(path))
        return scored if kept.items() <= scored.items() else kept

    return Kind(path, read)


KINDS: dict[str, Callable[[Path], Kind]] = {
    **{name: lambda at, name=name: results_file(at, name) for name in ("record.json", "samples.parquet")},
    "fidelity.parquet": lambda at: results_file(at, "fidelity.parquet"),
    "status, record.json": lambda at: listed_result(at, "record.json"),
    "status, samples.parquet": lambda at: listed_result(at, "samples.parquet"),
    "status, fidelity.parquet": lambda at: listed_result(at, "fidelity.parquet"),
    "note of an attempt": lambda at: note(at, "attempt.json"),
    "note of a failure": lambda at: note(at, "failed.json"),
    "record of a measurement": lambda at: measurement(at, "record.json"),
    "samples of a measurement": lambda at: measurement(at, "samples.parquet"),
    "calibration.json": lambda at: calibration_file(at, "calibration.json"),
    "calibration.safetensors": lambda at: calibration_file(at, "calibration.safetensors"),
    "file of an asset": lambda at: asset_file(at, "text.txt"),
    "manifest of an asset": lambda at: asset_file(at, "manifest.json"),
    "progress of a calibration": progress,
    "sensitivity of a calibration": sensitivity,
    "record of a benchmark": benchmark,
    "journal": journal,
    "record.json without checksums": lambda at: results_file(at, "record.json", checked=False),
    "samples.parquet without checksums": lambda at: results_file(at, "samples.parquet", checked=False),
    "fidelity.parquet without checksums": lambda at: results_file(at, "fidelity.parquet", checked=False),
    "calibration.json without checksums": lambda at: calibration_file(at, "calibration.json", checked=False),
    "calibration.safetensors without checksums": lambda at: calibration_file(
        at, "calibration.safetensors", checked=False
    ),
}


def flipped(content: bytes) -> Iterator[bytes]:
    """The content with one bit turned, at places drawn from all of it."""
    places = random.Random(0).sample(range(8 * len(content)), min(FLIPS, 8 * len(content)))
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


# Made anew as they are read, or read without what is damaged.
MENDED = ("file of an asset", "manifest of an asset", "journal")


def said_or_read(kind: Kind) -> tuple[str | None, Any]:
    """The line that refuses a file, or what was read."""
    try:
        return None, kind.read()
    except (RunError, SettingError) as error:
        return str(error), NOTHING


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_gives_the_same_values_or_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path))
    kind = KINDS[name](tmp_path)
    content, written = kind.path.read_bytes(), kind.read()
    noticed = 0
    for changed in flipped(content):
        kind.path.write_bytes(changed)
        line, found = said_or_read(kind)
        assert line is None or len(line.splitlines()) == 1
        assert found is NOTHING or found == written or not kind.checked
        noticed += found is NOTHING
    assert noticed or not kind.checked or name in MENDED
    kind.path.write_bytes(content)
    assert kind.read() == written
