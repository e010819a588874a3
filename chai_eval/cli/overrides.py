"""From what a user types to settings, through Hydra's compose API; every mistake is one line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chai_eval.cli.verbatim import as_typed, several, verbatim
from chai_eval.errors import SettingError
from chai_eval.measure.settings import given_while_off
from chai_eval.resources import conf_dir
from chai_eval.settings import Settings, parse_settings
from chai_eval.values import unknown

LAUNCHER = "hydra/launcher"
# Our launcher files build on the plugins' own, which have the names that users know.
OURS = "on_"
# The model that stands for a path of the user's.
LOCAL = "local"

# Settings of the model that are so common that the group's name may be left out.
SHORT = {
    name: f"model.{name}"
    for name in ("path", "revision", "weights", "dtype", "device", "layers", "device_map", "tokenizer")
} | {"launcher": LAUNCHER}

# Their values are taken as they are typed: folders have spaces, brackets and = in their names, sentences commas.
VERBATIM = (
    *("model.path", "model.revision", "model.tokenizer", "data_dir", "text", "results_dir"),
    *("include_path", "system_instruction"),
)


@dataclass(frozen=True)
class Job:
    """One run: its settings, the overrides they come from, and how a user would name it within a sweep."""

    settings: Settings
    overrides: tuple[str, ...]
    label: str
    launcher: str = "basic"


@contextmanager
def configuration() -> Iterator[None]:
    """Hydra, looking at this package's configuration."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir().absolute()), job_name="chai_eval", version_base="1.3"):
        yield


def groups() -> list[str]:
    """Settings whose value is the name of a file: `model`, `method` and whatever else has a folder of choices."""
    return sorted(path.name for path in conf_dir().iterdir() if path.name != "hydra" and choices(path.name))


def choices(group: str) -> list[str]:
    """Names that can be chosen in a group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def launchers() -> list[str]:
    """What can run the jobs of a sweep: this process (`basic`), or one of Hydra's launchers."""
    return ["basic", *(name.removeprefix(OURS) for name in choices(LAUNCHER))]


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
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        swept = [_values(_rewrite(argument, multirun), parser, multirun) for argument in _completed(arguments)]
        return [_job(list(one), swept) for one in itertools.product(*swept)]


def settings_of(overrides: Sequence[str]) -> Settings:
    """Compose the settings of one job, within `configuration()`.

    Raises
    ------
    SettingError
    """
    grouped = groups()
    for override in overrides:
        key, value = override.lstrip("+").split("=", 1)
        if key in grouped and value not in choices(key):
            raise unknown(key, value.strip("'\""), choices(key))
    chosen = [override for override in overrides if override.split("=", 1)[0] in grouped]
    known = OmegaConf.to_container(_compose(chosen, "model, method"), resolve=False)
    for override in overrides:
        if override not in chosen and not override.startswith("+"):
            _refuse_unknown(override.split("=", 1)[0], known)
    naming = " ".join(each.lstrip("+") for each in overrides)
    config = _compose([each for each in overrides if not each.startswith("hydra")], naming)
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise SettingError(f"{error.full_key or 'settings'}: {_first_line(error)}; allowed: a value") from error
    assert isinstance(plain, dict)
    return parse_settings({str(key): value for key, value in plain.items()})


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
    """What Hydra wants before a setting that its file needn't have: what a model's config holds isn't our business."""
    return "++" if key == "model.config" or key.startswith("model.config.") else ""


def _values(argument: str, parser: OverridesParser, multirun: bool) -> list[str]:
    """The overrides that one argument stands for: one, or one per value of a sweep."""
    key, value = argument.split("=", 1)
    try:
        override: Override = parser.parse_override(argument)
    except HydraException as error:
        raise SettingError(
            f"{key.lstrip('+')}: {value!r} given, which can't be read ({_first_line(error)}); "
            "allowed: a value, quoted where it has special characters"
        ) from error
    if not override.is_sweep_override():
        return [argument]
    if not multirun:
        raise SettingError(f"{key}: {value!r} given, several values; allowed: one value, or -m to run each of them")
    pattern: Any = override.value()
    if isinstance(pattern, Glob) and key in groups():
        return [f"{key}={each}" for each in _matching(key, value, pattern)]
    if isinstance(pattern, Glob) or not override.is_discrete_sweep():
        names = ", glob(…)" if key in groups() else ""
        raise SettingError(f"{key}: {value!r} given; allowed: a list of values, range(…), choice(…){names}")
    return [f"{key}={each}" for each in override.sweep_string_iterator()]


def _matching(group: str, given: str, pattern: Glob) -> list[str]:
    names = pattern.filter(choices(group))
    if not names:
        raise SettingError(f"{group}: {given!r} given, which matches nothing; allowed: {', '.join(choices(group))}")
    return names


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


def _compose(overrides: list[str], naming: str) -> DictConfig:
    try:
        return compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingError(f"{naming}: {_first_line(error)}; allowed: see --help") from error


def _refuse_unknown(key: str, known: Any) -> None:
    """Refuse a setting that no configuration file has, naming the one that may have been meant."""
    if key == LAUNCHER or key.startswith("hydra.launcher."):
        return
    reached: list[str] = []
    for part in key.split("."):
        if not isinstance(known, dict) or part not in known:
            names = [str(name) for name in known if name != "name"] if isinstance(known, dict) else []
            if not reached:
                inside = [f"{group}.{part}" for group in groups() if part in known.get(group, {})]
                if inside:
                    raise SettingError(f"{key}: unknown (did you mean {inside[0]}?); allowed: {', '.join(inside)}")
                names += SHORT
            if reached == ["measure"] and not names:  # conf/measure/off.yaml has no settings
                raise given_while_off(key)
            raise unknown(key, part, names)
        known = known[part]
        reached.append(part)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip()
