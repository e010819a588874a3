"""One run from top to bottom: settings → model → method → scoring → record → table. The file to read first."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.evaluation import Evaluation, Result
from chai_eval.measure.stored import Measurement, measured
from chai_eval.measure_settings import check_positions
from chai_eval.methods import build_method
from chai_eval.models import check_path
from chai_eval.report import Header, Row, published
from chai_eval.report.rows import describe, row
from chai_eval.scoring.chat import chat_template
from chai_eval.scoring.tasks import check_text, is_own, primary_metric, task_names
from chai_eval.scoring.tokens import check_tokens
from chai_eval.session import Session
from chai_eval.settings import Settings
from chai_eval.store.folder import check_writable, has_results


@dataclass(frozen=True)
class Failure:
    """Something that a run could not do: one line, and the traceback where the error was not foreseen."""

    what: str
    why: str
    setting: bool = False
    trace: str | None = None


@dataclass(frozen=True)
class Compared:
    """What a row was made of: results of plain attention and of the method (None for plain attention alone)."""

    task: str
    mha: Result
    other: Result | None = None
    fidelity: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """What a run ends with: the table's header and rows, what each was made of, what was measured, and what failed."""

    header: Header | None = None
    rows: tuple[Row, ...] = ()
    failures: tuple[Failure, ...] = ()
    measurement: Measurement | None = None
    compared: tuple[Compared, ...] = field(default=(), repr=False, compare=False)


def run(settings: Settings, session: Session) -> Report:
    """Score a method and its baseline on the same documents, task by task.

    A task that fails is reported and doesn't end the others; where only its comparison of next tokens does, its scores
    are in the table all the same. SettingError where a setting has a wrong value: nothing has been written then.
    RunError where the model or a task can't be loaded.
    """
    names = check(settings, session)
    method = build_method(settings.method.name, **settings.method.options)
    baseline = build_method("mha")

    loaded = session.model(settings.model)
    method = method.for_model(loaded.model)
    chat_template(loaded.tokenizer, settings.task.prompts)
    method.check(loaded.model)  # plain attention, which the baseline is, is a part of it
    if settings.measure is not None:
        check_positions(settings.measure, loaded.model)
    check_tokens(
        loaded.model, loaded.tokenizer, (session.prepared(name, settings.task, settings.seed) for name in names)
    )

    rows, compared, failures = [], [], []
    for name in names:
        try:
            prepared = session.prepared(name, settings.task, settings.seed, loaded)
            mha = Evaluation(settings.baseline(), loaded, baseline, prepared, session.ranks).result()
            other = fidelity = None
            if method.name != "mha":
                evaluation = Evaluation(settings, loaded, method, prepared, session.ranks)
                other = evaluation.result()
                try:
                    fidelity = evaluation.fidelity()
                except Exception as error:
                    # The scores are finished without their comparison: no wrong setting.
                    left_out = failure(f"{name}, fidelity", error)
                    said = f"{left_out.why}; fidelity=0 leaves it out"
                    failures.append(replace(left_out, why=said, setting=False))
            own = is_own(name, settings.task.included)
            paper = None if own else published(settings.model.paper, method.name, name)
            rows.append(row(name, None if own else primary_metric(name), mha, other, paper, fidelity))
            compared.append(Compared(name, mha, other, fidelity))
        except Exception as error:
            failures.append(failure(name, error))
    measurement = None
    if settings.measure is not None:
        try:
            measurement = measured([settings], loaded)
        except Exception as error:
            failures.append(failure("measure", error))
    described = describe(settings, loaded, method)
    return Report(described, tuple(rows), tuple(failures), measurement, tuple(compared))


def attempt(settings: Settings, session: Session) -> Report:
    """As `run`, but whatever ends it is part of its report, so that it doesn't end the other jobs of a sweep."""
    try:
        return run(settings, session)
    except Exception as error:
        return Report(failures=(failure("", error),))


def check(settings: Settings, session: Session) -> list[str]:
    """Check all that can be checked before minutes go into loading a model; return the names of the tasks.

    Raises SettingError, or RunError where the documents of a task can't be loaded.
    """
    # What is finished is shown also where nothing can be written.
    if settings.measure is not None or not has_results(settings.results_dir, settings.model.name):
        check_writable(settings.results_dir)
    check_path(settings.model.path)
    build_method(settings.method.name, **settings.method.options)
    names = task_names(settings.task.choice, settings.task.included)
    check_text(names, settings.task.text)
    for name in names:
        session.task(name, settings.task)
    return names


def failure(what: str, error: Exception) -> Failure:
    """Describe an error that ended a task or a job."""
    foreseen = isinstance(error, SettingError | RunError)
    trace = None if foreseen else "".join(traceback.format_exception(error))
    return Failure(what, failure_line(error), isinstance(error, SettingError), trace)
