"""`python -m chai_eval +experiment=NAME`: from what is typed to plans of experiments, all checked before the first."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from chai_eval.calibration.settings import AnalysisSettings
from chai_eval.cli.configuration import SHORT, choices, configuration, plain_values
from chai_eval.cli.overrides import EXPERIMENT, single, values
from chai_eval.cli.request import Request
from chai_eval.errors import RunError, SettingError, failure_line, unknown, wrong
from chai_eval.experiments.plan import ANALYSES, Experiment, Plan
from chai_eval.hub import check_hub
from chai_eval.resources import conf_dir
from chai_eval.schema import read
from chai_eval.settings import Settings

FLAGS = {"true": True, "false": False, "null": None}


def names_experiment(arguments: Sequence[str]) -> bool:
    """Whether an experiment is asked for."""
    return any(_key(each) == EXPERIMENT for each in arguments)


def run_experiments(request: Request) -> int:
    """Do the experiments that are asked for, one after the other; return the exit status.

    Raises
    ------
    SettingError
        For a wrong setting of any of them, before the first is begun.
    RunError
        Where a single one fails; of several the others are done, and what failed is said at the end.
    """
    if request.ranks.size > 1:
        processes = f"{request.ranks.size} processes of accelerate or torchrun"
        raise SettingError(f"{EXPERIMENT}: given with {processes}; allowed: one process")
    plans = plans_of(request.arguments, multirun=request.multirun)

    # These need torch, which takes seconds to import; a mistyped setting is told before.
    from chai_eval.experiments.command import carry_out
    from chai_eval.experiments.counts import with_counts
    from chai_eval.session import Session

    plans = [with_counts(plan) for plan in plans]
    if request.session is None:
        check_hub(plans[0].settings.model)
    session = request.session or Session()
    failed: list[tuple[str, Exception]] = []
    for plan in plans:
        try:
            carry_out(plan, session)
        except (SettingError, RunError) as error:
            if len(plans) == 1:
                raise
            failed.append((plan.experiment.name, error))
    if not failed:
        return 0
    said = "; ".join(f"{name} ({failure_line(error)})" for name, error in failed)
    sys.stderr.write(f"{len(failed)} of {len(plans)} experiments failed: {said}\n")
    return 2 if all(isinstance(error, SettingError) for _, error in failed) else 1


def plans_of(arguments: Sequence[str], *, multirun: bool = False) -> list[Plan]:
    """Compose and check the settings of every experiment that arguments name.

    Raises
    ------
    SettingError
        For the first mistake.
    """
    with configuration():
        return [_plan(name, arguments) for name in _names(arguments, multirun=multirun)]


def _names(arguments: Sequence[str], *, multirun: bool) -> list[str]:
    given = [each for each in arguments if _key(each) == EXPERIMENT]
    if len(given) > 1:
        raise SettingError(f"{EXPERIMENT}: given {len(given)} times; allowed: once, several with -m +{EXPERIMENT}=a,b")
    allowed = None if multirun else "one of them, or -m to do one after the other"
    found = [each.partition("=")[2] for each in values(given[0].lstrip("+"), allowed)]
    for name in found:
        if name not in choices(EXPERIMENT):
            raise unknown(EXPERIMENT, name, choices(EXPERIMENT))
    return found


def _plan(name: str, arguments: Sequence[str]) -> Plan:
    given = [each for each in arguments if _key(each) != EXPERIMENT]
    quick, given = _flag("quick", given, False)
    stated = _stated(name)
    analysed = stated.get("shows") in ANALYSES
    figures, given = _flag("figures", given, None)
    # Where results lie is `out` to an analysis.
    given = [f"out={each.partition('=')[2]}" if analysed and _key(each) == "results_dir" else each for each in given]
    own = single(given)
    if quick:
        typed = [_key(each) for each in own]
        own = [*(each for each in single(shlex.split(stated.get("quick", ""))) if _key(each) not in typed), *own]
    own = [f"+{EXPERIMENT}={name}", *own]
    if analysed:
        found = plain_values(own, "analyse")
        experiment = _experiment(name, found)
        analysis = read(AnalysisSettings, found)
        where = analysis.out or Path("results")
        return Plan(experiment, analysis, {}, where, bool(quick), figures, _command(name, arguments))
    found = plain_values(own, "config")
    experiment = _experiment(name, found)
    settings = read(Settings, found)
    runs = {label: _run(own, label, str(typed)) for label, typed in experiment.runs.items()}
    return Plan(experiment, settings, runs, settings.results_dir, bool(quick), figures, _command(name, arguments))


def _run(own: Sequence[str], label: str, typed: str) -> Settings:
    """Settings of one of an experiment's runs."""
    more = single(shlex.split(typed))
    for each in own:
        if _key(each) in ("method", *map(_key, more)):
            raise SettingError(
                f"{each}: given with an {EXPERIMENT}, whose run {label!r} sets it; allowed: other settings"
            )
    found = plain_values([*own, *more], "config")
    del found[EXPERIMENT]
    return read(Settings, found)


def _experiment(name: str, found: dict[str, Any]) -> Experiment:
    """What the file says of itself, taken from the settings."""
    stated = found.pop(EXPERIMENT, None)
    if not isinstance(stated, Mapping):
        raise SettingError(
            f"{EXPERIMENT}: {name}.yaml has nothing under {EXPERIMENT}; allowed: as the other files have it"
        )
    experiment = read(Experiment, {"name": name, **stated}, f"{EXPERIMENT}.")
    if not experiment.runs and not experiment.methods and experiment.shows not in ANALYSES:
        raise SettingError(f"{EXPERIMENT}.runs: none given; allowed: runs, or methods with savings")
    return experiment


def _stated(name: str) -> Mapping[str, Any]:
    """The same before anything is composed: it says what there is to compose."""
    stated = yaml.safe_load((conf_dir() / EXPERIMENT / f"{name}.yaml").read_text(encoding="utf-8")).get(EXPERIMENT)
    return stated if isinstance(stated, Mapping) else {}


def _flag(name: str, arguments: Sequence[str], default: bool | None) -> tuple[bool | None, list[str]]:
    """A setting of all experiments that is true or false, and what else was typed."""
    value = default
    for each in (each for each in arguments if _key(each) == name):
        typed = each.partition("=")[2].lower()
        if typed not in FLAGS or (FLAGS[typed] is None and default is not None):
            raise wrong(name, each.partition("=")[2], "true, false" if default is not None else "true, false, null")
        value = FLAGS[typed]
    return value, [each for each in arguments if _key(each) != name]


def _key(argument: str) -> str:
    typed = argument.lstrip("+").partition("=")[0]
    return SHORT.get(typed, typed)


def _command(name: str, arguments: Sequence[str]) -> str:
    """What does this experiment alone."""
    others = [each for each in arguments if _key(each) != EXPERIMENT]
    return shlex.join(["python", "-m", "chai_eval", f"+{EXPERIMENT}={name}", *others])
