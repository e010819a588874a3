"""What a model without calibration lacks, said before it is loaded; counts of one that a user has calibrated."""

from __future__ import annotations

from dataclasses import replace

from chai_eval.calibration_file import COMMAND, calibrated_presets, calibration
from chai_eval.errors import SettingError
from chai_eval.experiments.plan import Plan
from chai_eval.settings import Settings


def with_counts(plan: Plan) -> Plan:
    """The plan with the cluster counts of the model's calibration, wherever counts are needed and none are given.

    Raises
    ------
    SettingError
        Where the model has no calibration.
    """
    if plan.experiment.methods:
        calibration(plan.model, "method.clusters")
    if plan.experiment.shows == "membership_changes" and plan.analysis.counts is None:
        plan = replace(plan, settings=replace(plan.analysis, counts=_balanced(plan.model, "counts")))
    return replace(plan, runs={label: _counted(settings) for label, settings in plan.runs.items()})


def _counted(settings: Settings) -> Settings:
    options = settings.method.options
    if options.get("clusters", ()) is not None:
        return settings
    clusters = _balanced(settings.model.name, "method.clusters")
    return replace(settings, method=replace(settings.method, options={**options, "clusters": clusters}))


def _balanced(model: str, setting: str) -> str:
    """The balanced preset of a model's calibration."""
    preset = f"{model}-balanced"
    if preset not in calibrated_presets():
        raise SettingError(
            f"{setting}: no cluster counts are known for {model}; allowed: a list of counts, a preset, or a "
            f"calibration, made by `{COMMAND}{model}`"
        )
    return preset
