"""Experiments that score: runs beside plain attention, beside each other, and beside the paper."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from chai_eval.errors import RunError, SettingError
from chai_eval.experiments.outcome import Outcome, named
from chai_eval.experiments.plan import Plan
from chai_eval.experiments.score_figures import dots, over
from chai_eval.experiments.score_rows import against_frame, ours_frame
from chai_eval.experiments.score_tables import body
from chai_eval.measure.fresh import recipe
from chai_eval.methods import METHODS
from chai_eval.run import Report, check, run
from chai_eval.session import Session
from chai_eval.settings import MethodSettings, Settings

log = logging.getLogger("chai_eval")

# Tokens of the longest texts that methods at equal savings are made for: more than the questions of the tasks have.
CONTEXT = 256


def scores(plan: Plan, session: Session) -> Outcome:
    """Score every run of an experiment, those that are finished from the disk.

    Raises
    ------
    SettingError
        For a wrong setting of any run, before the model is loaded where that can be told.
    RunError
        Where a task of a run fails; the others are scored first.
    """
    for settings in plan.runs.values():
        check(settings, session)
    loaded = session.model(plan.scoring.model)
    runs = plan.runs or at_savings(plan, session)
    reports: dict[str, Report] = {}
    failed = []
    for number, (label, settings) in enumerate(runs.items(), 1):
        log.info("%s[%d/%d] %s", "quick " if plan.quick else "", number, len(runs), label)
        reports[label] = run(settings, session)
        failed += [f"{label}, {each.what}: {each.why}" for each in reports[label].failures]
    if failed:
        raise RunError("; ".join(failed))
    plan = replace(plan, runs=runs)
    ours = ours_frame(plan, reports)
    beside = against_frame(plan, reports, plan.experiment.against)
    data = {"data": ours, **({"against": beside} if beside is not None else {})}
    draw = partial(over if plan.experiment.x else dots, ours, plan)
    described = {"name": plan.model, "fingerprint": loaded.fingerprint, "dtype": loaded.dtype, "device": loaded.device}
    sources = {label: _sources(report, plan) for label, report in reports.items()}
    return Outcome(described, data, body(plan, ours, beside), figures={plan.experiment.name: draw}, sources=sources)


def at_savings(plan: Plan, session: Session) -> dict[str, Settings]:
    """Runs of methods at equal savings, as the frontier has them.

    Raises
    ------
    SettingError
        For a method that is unknown or out of reach of these savings, a model without calibration.
    """
    base, experiment = plan.scoring, plan.experiment
    found: dict[str, Settings] = {}
    model = session.model(base.model).model
    for name in experiment.methods:
        if name not in METHODS:
            raise SettingError(f"experiment.methods: {name!r} given; allowed: {', '.join(METHODS)}")
        for saving in experiment.savings:
            for method in METHODS[name].at_savings(model, base.model.name, [saving], CONTEXT):
                described = recipe(method)
                settings = MethodSettings(described.pop("name"), described)
                found[f"{name} {100 * saving:g} %"] = replace(base, method=settings)
    if not found:
        raise SettingError(
            f"experiment.savings: {list(experiment.savings)} given, out of reach of {', '.join(experiment.methods)}; "
            "allowed: other savings"
        )
    return found


def _sources(report: Report, plan: Plan) -> dict[str, dict[str, str]]:
    """Where each task's results lie."""
    return {
        each.task: {
            name: named(result.folder.path, plan.results_dir)
            for name, result in (("mha", each.mha), ("method", each.other))
            if result is not None
        }
        for each in report.compared
    }
