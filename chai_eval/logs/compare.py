"""Two runs on the same documents: task by task and metric by metric, paired, with the documents that flipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chai_eval.errors import RunError, SettingError, unknown
from chai_eval.logs.flips import Flip, flips
from chai_eval.logs.log import Found, TaskLog
from chai_eval.logs.open import open_run
from chai_eval.logs.pairs import pair
from chai_eval.report.metrics import difference, measured, samples_of
from chai_eval.report.tables import Row


@dataclass(frozen=True)
class Comparison:
    """What there is to say about two runs.

    Attributes
    ----------
    facts
        What A and B are.
    rows
        One for each task and metric: A's score as `mha`, B's as `method`, B minus A with its interval and p.
    flips
        Of every row whose documents are right or wrong.
    remarks
        What a reader should know: what was left out, and what the two don't share.
    """

    facts: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    flips: tuple[Flip, ...]
    remarks: tuple[str, ...]


def compare(
    a: str,
    b: str,
    tasks: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    flipped: bool = True,
) -> Comparison:
    """Compare two runs, each a folder of lm-eval's logs or of our results, or a pattern of such.

    Parameters
    ----------
    tasks, metrics
        Which ones; all that both have where None. A metric goes by its name, with or without its filter.
    flipped
        Whether the documents that flipped are wanted.

    Raises
    ------
    SettingError
        A folder has no logs or those of several runs, or the two lack a task or metric that was asked for.
    RunError
        A log is damaged, or the two have no document in common.
    """
    (first, remarks), (second, more) = open_run("A", a), open_run("B", b)
    work = _Work(flipped, [*remarks, *more])
    sources: tuple[dict[str, None], dict[str, None]] = {}, {}
    known: dict[str, None] = {}
    for task in work.tasks(first, second, tasks):
        logs = first[task].read(), second[task].read()
        for name, log, source in zip("AB", logs, sources, strict=True):
            source[log.source] = None
            if log.expected is not None:
                there = log.samples["doc_id"].nunique()
                work.remarks.append(f"{task}: {name}'s log has {there} documents, its results are of {log.expected}")
        versions = [log.version for log in logs]
        if None not in versions and versions[0] != versions[1]:
            work.remarks.append(f"{task}: version {versions[0]} of the task in A, {versions[1]} in B")
        shared = [each for each in logs[0].metrics if each in logs[1].metrics]
        known |= dict.fromkeys(shared)
        for metric in shared:
            if metrics is None or metric in metrics or metric.partition(" (")[0] in metrics:
                work.add(task, metric, logs)
    for each in metrics or ():
        if not any(each in (metric, metric.partition(" (")[0]) for metric in known):
            raise unknown("metric", each, known)
    said = tuple(dict.fromkeys(work.remarks))
    if not work.rows:
        raise RunError(f"A and B have nothing to compare: {'; '.join(said) or 'no metric in common'}")
    facts = tuple((name, f"{given}: {', '.join(of)}") for name, given, of in zip("AB", (a, b), sources, strict=True))
    return Comparison(facts, tuple(work.rows), tuple(work.flips), said)


@dataclass
class _Work:
    """A comparison while it is made."""

    flipped: bool
    remarks: list[str]
    rows: list[Row] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)

    def tasks(self, first: Mapping[str, Found], second: Mapping[str, Found], wanted: Sequence[str] | None) -> list[str]:
        """Those that both have, of those that are wanted."""
        both = [task for task in first if task in second]
        if not both:
            raise SettingError(
                f"B: its tasks {', '.join(second)} given beside those of A, {', '.join(first)}; "
                "allowed: logs with a task in common"
            )
        for task in wanted or ():
            if task not in both:
                raise unknown("task", task, both)
        if wanted is None:
            for name, alone in (("A", first.keys() - second.keys()), ("B", second.keys() - first.keys())):
                if alone:
                    self.remarks.append(f"only in {name}: {', '.join(sorted(alone))}")
        return [task for task in both if wanted is None or task in wanted]

    def add(self, task: str, metric: str, logs: tuple[TaskLog, TaskLog]) -> None:
        """Compare a metric, where its documents are known and any of them are the same."""
        (first, column), (second, _) = (samples_of(log.samples, metric) for log in logs)
        if any(column not in each for each in (first, second)):
            self.remarks.append(f"{task}: no samples of {metric}")
            return
        pairs = pair(task, column, first, second)
        self.remarks += pairs.remarks
        if not pairs.places:
            return
        before, after = (
            measured(frame[column], log.metrics[metric]).of([each[side] for each in pairs.places])
            for side, (frame, log) in enumerate(zip((pairs.first, pairs.second), logs, strict=True))
        )
        found = difference(before, after)
        percent = before.percent and after.percent
        self.rows.append(Row(task, metric, len(pairs.places), before.value, after.value, found, percent))
        if self.flipped and found.p is not None:
            self.flips += flips(task, metric, pairs, logs[0].texts)
