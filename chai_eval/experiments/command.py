"""An experiment from its plan to its folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from chai_eval.calibration.figures import INSTALL, to_be_drawn
from chai_eval.errors import RunError
from chai_eval.experiments.heads import error_curves, head_correlation
from chai_eval.experiments.measured import kv_memory, latency
from chai_eval.experiments.membership import membership_changes
from chai_eval.experiments.outcome import TABLE, Outcome, write
from chai_eval.experiments.plan import Plan, Shows
from chai_eval.experiments.scores import scores
from chai_eval.files import held
from chai_eval.session import Session

log = logging.getLogger("chai_eval")

SHOWN: dict[Shows, Callable[[Plan, Session], Outcome]] = {
    "scores": scores,
    "head_correlation": head_correlation,
    "error_curves": error_curves,
    "membership_changes": membership_changes,
    "kv_memory": kv_memory,
    "latency": latency,
}


def carry_out(plan: Plan, session: Session) -> None:
    """Do an experiment, write what it found to its folder, and print the table.

    Raises
    ------
    SettingError
        A model without what a method needs, text that isn't there, and whatever else a run, an analysis or a
        measurement refuses.
    RunError
        Where a part fails; what was scored is kept, and the same command goes on from there.
    """
    drawn = to_be_drawn(plan.figures)
    name = f"{plan.experiment.name}-{plan.folder.name}"
    said = f"{'quick ' if plan.quick else ''}experiment {plan.experiment.name}, {plan.model}"

    def taken() -> None:
        log.warning("%s is being made by another process; waiting for it", plan.folder)

    log.info("%s", said)
    try:
        with held(plan.results_dir / ".locks" / f"experiment-{name}.lock", taken):
            write(plan, SHOWN[plan.experiment.shows](plan, session), drawn=drawn)
    except OSError as error:
        raise RunError(f"results_dir: {plan.results_dir} can't be written: {error.strerror or error}") from error
    sys.stdout.write((plan.folder / TABLE).read_text(encoding="utf-8") + f"\n{said}: {plan.folder}\n")
    if plan.figures is None and not drawn:
        sys.stdout.write(f"No figures, for want of matplotlib: {INSTALL}\n")
    sys.stdout.flush()
