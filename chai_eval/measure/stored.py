"""A measurement of a run, recorded beside its results: `<results_dir>/<model>/measure/<key>/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from chai_eval.errors import SettingError
from chai_eval.files import held
from chai_eval.measure.contenders import Contender, contender
from chai_eval.measure.figures import Sample
from chai_eval.measure.grid import measure
from chai_eval.measure.progress import Progress
from chai_eval.measure_settings import check_positions
from chai_eval.methods import build_method
from chai_eval.store.key import result_key
from chai_eval.store.provenance import git_revision, machine, versions
from chai_eval.store.record import write_record

if TYPE_CHECKING:
    from chai_eval.session import LoadedModel
    from chai_eval.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """A recorded measurement and where it lies."""

    path: Path
    record: Mapping[str, Any]


def measured(runs: Sequence[Settings], loaded: LoadedModel, labels: Sequence[str] | None = None) -> Measurement:
    """Measure a model under the methods of some runs, side by side, and record it.

    A finished one is measured anew: a machine is not the same from one hour to the next. One that was killed goes on
    with the points of the grid that it had not come to; where another process measures the same, this one waits. The
    key names what was asked.

    Runs are alike but for their method, and the first one's folder is written to; `labels` are what to call methods of
    the same name. SettingError for a grid that the model can't be measured on, or a method that doesn't fit it;
    RunError where a fresh process fails, or the folder can't be written.
    """
    first = runs[0]
    if first.measure is None:
        raise SettingError("measure: 'off' given; allowed: latency, memory, full")
    check_positions(first.measure, loaded.model)
    methods = []
    for number, each in enumerate(runs):
        method = build_method(each.method.name, **each.method.options)
        method.check(loaded.model)
        methods.append(contender(method, labels[number] if labels else None))
    parts = _key_parts(first, loaded, methods)
    key = result_key(parts)
    path = first.results_dir / first.model.name / "measure" / key
    lock = first.results_dir / ".locks" / f"{first.model.name}-measure-{key}.lock"
    with held(lock, lambda: log.warning("%s is being measured by another process; waiting for it", path)):
        started = time.monotonic()
        progress = Progress(path / "parts", {"threads": torch.get_num_threads()})
        found = measure(loaded.model, methods, first.measure, source=first.model, progress=progress)
        record = {
            "kind": "measure",
            "key": key,
            **found.record,
            "config": first.as_config(),
            "key_parts": parts,
            "versions": versions(),
            "git": git_revision(),
            "machine": parts["machine"],
            "wall_seconds": round(time.monotonic() - started, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_record(path, record, pd.DataFrame(found.samples, columns=[each.name for each in fields(Sample)]))
        progress.finish()
    log.info("measured: %s", path)
    return Measurement(path, record)


def _key_parts(first: Settings, loaded: LoadedModel, methods: Sequence[Contender]) -> dict[str, Any]:
    modules, known = [name for each in methods for name in each.method.modules], versions()
    return {
        "model": {"fingerprint": loaded.fingerprint, "architecture": loaded.architecture, "dtype": loaded.dtype},
        "device": loaded.device,
        "methods": [{"name": each.name, **each.as_config()} for each in methods],
        "measure": None if first.measure is None else first.measure.as_config(),
        "versions": {package: known[package] for package in ("torch", "transformers")},
        "code": loaded.code.version("chai_eval.attention", *modules),
        "machine": machine(),
    }
