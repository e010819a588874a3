"""How a job of a sweep ends, in this process or in one of a launcher's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chai_eval.run import Failure, Report
    from chai_eval.session import Session
    from chai_eval.settings import Settings


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its report, and what failed of it."""

    label: str
    report: Report | None
    failures: tuple[Failure, ...]


def attempt(settings: Settings, session: Session, label: str) -> Outcome:
    """Run one job; whatever ends it is part of its outcome, so that it doesn't end the others."""
    from chai_eval.run import failure, run

    try:
        report = run(settings, session)
    except Exception as error:
        return Outcome(label, None, (failure("", error),))
    return Outcome(label, report, report.failures)
