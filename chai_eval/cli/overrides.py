"""From what a user types to settings, through Hydra's compose API; every mistake is one line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from chai_eval.cli.configuration import (
    LAUNCHER,
    OURS,
    SHORT,
    choices,
    configuration,
    first_line,
    groups,
    launchers,
    plain_values,
)
from chai_eval.cli.verbatim import as_typed, several, verbatim
from chai_eval.errors import SettingError, unknown
from chai_eval.schema import read
from chai_eval.settings import Settings

# The model that stands for a path of the user's.
LOCAL = "local"
# The group of the paper's tables and figures; what it chooses is done without another command.
EXPERIMENT = "experiment"


# Their values are taken as they are typed: folders have spaces, brackets and = in their names, sentences commas.
VERBATIM = (
    *("model.path", "model.revision", "model.tokenizer", "data_dir", "text", "results_dir"),
    *("include_path", "system_instruction", "out"),
)


@dataclass(frozen=True)
class Job:
    """One run: its settings, the overrides they come from, and how a user would name it within a sweep."""

    settings: Settings
    overrides: tuple[str, ...]
    label: str
    launcher: str = "basic"


def jobs_of(arguments: Sequence[str], *, multirun: bool) -> list[Job]:
    """Compose and check the settings of every job, before the first one starts.

    Parameters
    ----------
    arguments
        `setting=value` as typed; `setting=value,value` in a sweep.
    multirun
        Whether several values of a setting make several jobs.

    Raises
    ------
    SettingError
        For the first mistake in any of them.
    """
    with configuration():
        allowed = None if multirun else "one value, or -m to run each of them"
        swept = [values(_rewrite(argument, multirun), allowed) for argument in _completed(arguments)]
        return [_job(list(one), swept) for one in itertools.product(*swept)]


def composed(config: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Values of one of `CONFIGURATIONS` with what the user typed, one value a setting, as plain containers.

    Raises
    ------
    SettingError
        For an argument that can't be read, or a setting there is not.
    """
    with configuration():
        return plain_values(single(arguments), config)


def single(arguments: Sequence[str]) -> list[str]:
    """The overrides of arguments that have one value each; raises as `composed` does."""
    overrides = []
    for argument in _completed(arguments):
        override = _rewrite(argument, multirun=False)
        if override.startswith(f"{LAUNCHER}="):
            raise SettingError(f"{argument}: there is nothing to launch here; allowed: setting=value (see --help)")
        overrides += values(override, "one value")
    return overrides


def settings_of(overrides: Sequence[str]) -> Settings:
    """Compose the settings of one run, within `configuration()`; raises SettingError."""
    return read(Settings, plain_values(overrides, "config"))


def _completed(arguments: Sequence[str]) -> list[str]:
    """A model given by its path alone is one of its own, named by it: not the default one with other weights."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    path = given.get("path", given.get("model.path"))
    if path is None or "model" in given or LOCAL not in choices("model"):
        return list(arguments)
    name = re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^\w.+-]+", "_", Path(path.strip("'\"")).name))
    named = [] if "model.name" in given or "," in path or not name else [f"model.name='{name}'"]
    return [f"model={LOCAL}", *named, *arguments]


def _rewrite(argument: str, multirun: bool) -> str:
    """Bring one argument into the form that Hydra reads."""
    match = re.fullmatch(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)(=.*)?", argument, flags=re.DOTALL)
    if match is None or match[3] is None or match[1] == "~":
        raise SettingError(f"{argument}: not understood; allowed: setting=value (see --help)")
    key, value = SHORT.get(match[2], match[2]), match[3][1:]
    if key == EXPERIMENT:
        raise SettingError(
            f"{argument}: not understood here; allowed: python -m chai_eval +{EXPERIMENT}=NAME (see --help)"
        )
    if key == "include_path" and value.startswith("["):  # folders may come as a list
        value = f"[{','.join(map(verbatim, several(value[1:-1])))}]"
    elif key in VERBATIM:
        # A sentence has commas within a sweep, too.
        swept = multirun and "," in value and key != "system_instruction"
        value = ",".join(map(verbatim, several(value))) if swept else verbatim(value)
    if key == LAUNCHER and value != "basic":
        value = OURS + value.removeprefix(OURS)
    if key == "task" and "," in value and not multirun and not value.startswith("["):
        value = f"[{value}]"
    return f"{added(key)}{key}={value}"


def added(key: str) -> str:
    """What Hydra wants before a setting that its file needn't have: what a model's config holds isn't our business.

    Nor need the file of a method know that others may be put in beside it.
    """
    return "++" if key in ("model.config", "method.with") or key.startswith("model.config.") else ""


def values(argument: str, alone: str | None) -> list[str]:
    """The overrides that one argument stands for: one per value of a sweep; `alone` says what is allowed in none."""
    key, value = argument.split("=", 1)
    try:
        override: Override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise SettingError(
            f"{key.lstrip('+')}: {value!r} given, which can't be read ({first_line(error)}); "
            "allowed: a value, quoted where it has special characters"
        ) from error
    if not override.is_sweep_override():
        return [argument]
    if alone is not None:
        raise SettingError(f"{key}: {value!r} given, several values; allowed: {alone}")
    pattern: Any = override.value()
    if isinstance(pattern, Glob) and key in groups():
        if not (found := pattern.filter(choices(key))):
            raise SettingError(f"{key}: {value!r} given, which matches nothing; allowed: {', '.join(choices(key))}")
        return [f"{key}={each}" for each in found]
    if isinstance(pattern, Glob) or not override.is_discrete_sweep():
        names = ", glob(…)" if key in groups() else ""
        raise SettingError(f"{key}: {value!r} given; allowed: a list of values, range(…), choice(…){names}")
    return [f"{key}={each}" for each in override.sweep_string_iterator()]


def _job(overrides: list[str], swept: Sequence[Sequence[str]]) -> Job:
    varied = [one for one, values in zip(overrides, swept, strict=True) if len(values) > 1]
    settings = settings_of(overrides)
    label = " ".join(as_typed(one) if one.partition("=")[0] in VERBATIM else one for one in varied)
    label = label or f"{settings.model.name} {settings.method.name}"
    given = [each.partition("=")[2].removeprefix(OURS) for each in overrides if each.startswith(f"{LAUNCHER}=")]
    if given and given[-1] not in launchers():
        raise unknown("launcher", given[-1], launchers())
    if not given or given[-1] == "basic":
        for key in (override.lstrip("+").partition("=")[0] for override in overrides):
            if key.startswith("hydra."):
                raise SettingError(
                    f"{key}: given without a launcher; allowed: with launcher={'|'.join(launchers()[1:])}"
                )
    return Job(settings, tuple(overrides), label, *given[-1:])
