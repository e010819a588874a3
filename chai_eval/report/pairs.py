"""Results beside the plain attention they belong to, and beside each other, document by document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chai_eval.errors import RunError
from chai_eval.report.records import TaskResult
from chai_eval.report.rows import brief, measured_in, row
from chai_eval.report.tables import Row
from chai_eval.scoring.tasks import primary_metric
from chai_eval.task_settings import told

# Settings of a method that change how it is computed and no score.
SILENT = ("prefill",)
# Settings that may be lists of many numbers: told by what is saved.
LONG = ("clusters", "membership")


@dataclass(frozen=True)
class Pair:
    """A method's result on a task and plain attention's on the same documents.

    Attributes
    ----------
    label : str
        The method, and those of its settings that tell it from others of its name.
    row : Row
        See `report.rows.row`.
    """

    baseline: TaskResult
    result: TaskResult
    label: str
    row: Row

    @property
    def model(self) -> str:
        """The model's name."""
        return self.result.place[0]

    @property
    def task(self) -> str:
        """The task's name."""
        return self.result.place[1]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.result.place[2]

    def share(self, of: str) -> float | None:
        """Of plain attention's costs, what is `held`, `read` or multiplied; None where the saving is only simulated."""
        costs = self.result.record.get("costs") or {}
        return None if costs.get("simulated", True) else costs["of_mha"][of]

    @cached_property
    def right(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Scores of plain attention and of the method, [documents] each; None where the metric isn't their mean."""
        before, after = (measured_in(each, self.row.metric).scores for each in (self.baseline, self.result))
        return None if before is None or after is None else (before, after)


def pairs(results: Sequence[TaskResult], left_out: list[str]) -> list[Pair]:
    """Every method's newest result on most documents beside plain attention's, by model, method and task.

    What has no plain attention beside it is named in `left_out`.
    """
    chosen = _newest(each for each in results if each.place[2] != "mha")
    labels = _labels(chosen)
    found = []
    for result, label in zip(chosen, labels, strict=True):
        task = result.place[1]
        baseline = _baseline(result, results)
        if baseline is None:
            left_out.append(f"{result.path}: plain attention has no result on its documents")
            continue
        try:
            line = row(task, primary_metric(task), baseline, result, None, result.record.get("fidelity"))
        except RunError as error:
            left_out.append(str(error))
            continue
        found.append(Pair(baseline, result, label, line))
    return sorted(found, key=lambda each: (each.model, each.label, each.task))


def setup(result: TaskResult) -> dict[str, Any]:
    """What a result was made with beside model, method and task: precision, way of scoring, prompts."""
    parts, config = result.record["key_parts"], result.record["config"]
    return {
        "dtype": parts["model"].get("dtype"),
        "scoring": parts.get("scoring", "packed"),
        "seed": parts.get("seed"),
        **{name: value for name, _, value in (each.partition(" ") for each in told(config))},
    }


def _newest(results: Iterable[TaskResult]) -> list[TaskResult]:
    """Of results that differ in code or documents alone, the one on most documents; of those the latest."""
    best: dict[str, TaskResult] = {}
    for each in results:
        settings = {name: value for name, value in each.method_settings.items() if name not in SILENT}
        key = json.dumps([each.place, settings, setup(each)], sort_keys=True, default=str)
        if key not in best or _rank(each) > _rank(best[key]):
            best[key] = each
    return list(best.values())


def _rank(result: TaskResult) -> tuple[int, str, str]:
    record = result.record
    return int(record["n_documents"]), str(record.get("finished", "")), str(record["key"])


def _baseline(result: TaskResult, results: Sequence[TaskResult]) -> TaskResult | None:
    """Plain attention on the same documents under the same circumstances; of the same code where there is one."""

    def same(each: TaskResult) -> bool:
        ours, theirs = each.record["key_parts"], result.record["key_parts"]
        return (
            (*each.place[:2], each.place[2]) == (*result.place[:2], "mha")
            and all(ours.get(name) == theirs.get(name) for name in ("model", "task", "seed", "scoring"))
            and "doc_hash" in each.samples
            and "doc_hash" in result.samples
            and each.samples["doc_hash"].tolist() == result.samples["doc_hash"].tolist()
        )

    def closeness(each: TaskResult) -> tuple[bool, tuple[int, str, str]]:
        ours, theirs = each.record["key_parts"], result.record["key_parts"]
        return ours.get("versions") == theirs.get("versions"), _rank(each)

    return max(filter(same, results), key=closeness, default=None)


def _labels(results: Sequence[TaskResult]) -> list[str]:
    """Names of methods, each with the settings that differ among results of its name on the same model."""
    frames: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    said = []
    for each in results:
        words = {name: _said(each, name, value) for name, value in {**each.method_settings, **setup(each)}.items()}
        frames.setdefault((each.place[0], each.place[2]), []).append(words)
        said.append(words)
    varied = {
        place: [name for name in dict.fromkeys(chain(*all_words)) if len({each.get(name) for each in all_words}) > 1]
        for place, all_words in frames.items()
    }
    labels = []
    for each, words in zip(results, said, strict=True):
        model, _, method = each.place
        differing = [f"{name} {words[name]}" for name in varied[model, method] if name in words and name not in SILENT]
        labels.append(", ".join([method, *differing]))
    return labels


def _said(result: TaskResult, name: str, value: Any) -> str:
    """A setting in a few words."""
    if name in LONG:
        typed = result.record["config"]["method"].get(name)
        costs = (result.record.get("costs") or {}).get("of_mha", {})
        saved = f"{100 * (1 - costs['held']):.1f} % saved" if "held" in costs else brief(value)
        return f"{typed} ({saved})" if isinstance(typed, str) else saved
    return brief(value)
