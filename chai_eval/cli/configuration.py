"""What can be chosen and set: this package's configuration files, over the defaults that settings have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chai_eval.calibration.settings import AnalysisSettings, CalibrationSettings
from chai_eval.errors import SettingError, unknown
from chai_eval.frontier.settings import FrontierSettings
from chai_eval.logs.settings import CompareSettings
from chai_eval.measure_settings import MeasureSettings, given_while_off
from chai_eval.report_settings import ReportSettings
from chai_eval.resources import conf_dir
from chai_eval.schema import defaults
from chai_eval.settings import ModelSettings, Settings

LAUNCHER = "hydra/launcher"
# Our launcher files build on the plugins' own, which have the names that users know.
OURS = "on_"

# Settings of the model that are so common that the group's name may be left out.
SHORT = {
    name: f"model.{name}"
    for name in ("path", "revision", "weights", "dtype", "device", "layers", "device_map", "tokenizer")
} | {"launcher": LAUNCHER}

# Each configuration file that is composed whole, and the settings it begins with.
CONFIGURATIONS: dict[str, type[Any]] = {
    "config": Settings,
    "calibrate": CalibrationSettings,
    "analyse": AnalysisSettings,
    "frontier": FrontierSettings,
    "compare": CompareSettings,
    "report": ReportSettings,
}


@contextmanager
def configuration() -> Iterator[None]:
    """Hydra, looking at this package's configuration: its files, over the defaults that settings have."""
    store = ConfigStore.instance()
    for name, kind in CONFIGURATIONS.items():
        model = {"model": defaults(ModelSettings)} if has_model(kind) else {}
        store.store(f"{name}_defaults", defaults(kind) | model)
    store.store("grid", defaults(MeasureSettings), group="measure/base")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir().absolute()), job_name="chai_eval", version_base="1.3"):
        yield


def has_model(kind: type[Any]) -> bool:
    """Whether a model is among the settings."""
    return "model" in kind.__pydantic_fields__


def groups() -> list[str]:
    """Settings whose value is the name of a file: `model`, `method` and whatever else has a folder of choices."""
    return sorted(path.name for path in conf_dir().iterdir() if path.name != "hydra" and choices(path.name))


def choices(group: str) -> list[str]:
    """Names that can be chosen in a group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def launchers() -> list[str]:
    """What can run the jobs of a sweep: this process (`basic`), or one of Hydra's launchers."""
    return ["basic", *(name.removeprefix(OURS) for name in choices(LAUNCHER))]


def plain_values(overrides: Sequence[str], config: str) -> dict[str, Any]:
    """Compose a configuration file with overrides, within `configuration()`, as plain containers."""
    grouped = groups()
    for override in overrides:
        key, value = override.lstrip("+").split("=", 1)
        if key in grouped and value not in choices(key):
            raise unknown(key, value.strip("'\""), choices(key))
        if key.startswith("hydra") and not _launches(key):
            raise unknown(key, "hydra", [*defaults(CONFIGURATIONS[config]), *grouped, *SHORT])
    try:
        found = compose(config, [each for each in overrides if not each.startswith("hydra")])
    except (HydraException, OmegaConfBaseException) as error:
        _refuse_unknown(overrides, config)
        naming = " ".join(each.lstrip("+") for each in overrides)
        raise SettingError(f"{naming}: {first_line(error)}; allowed: see --help") from error
    try:
        plain = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise SettingError(f"{error.full_key or 'settings'}: {first_line(error)}; allowed: a value") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _launches(key: str) -> bool:
    return key == LAUNCHER or key.startswith("hydra.launcher.")


def _refuse_unknown(overrides: Sequence[str], config: str) -> None:
    """Refuse a setting that no configuration file has, naming the one that may have been meant."""
    grouped = groups()
    chosen = [each for each in overrides if each.lstrip("+").split("=", 1)[0] in grouped]
    try:
        known = OmegaConf.to_container(compose(config, chosen), resolve=False)
    except (HydraException, OmegaConfBaseException):  # a group that this command doesn't have
        known = OmegaConf.to_container(compose(config), resolve=False)
    for key in (each.split("=", 1)[0] for each in overrides if not each.startswith("+")):
        if not _launches(key):
            _refuse(key, known)


def _refuse(key: str, known: Any) -> None:
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


def first_line(error: Exception) -> str:
    """What an error of Hydra's says first; the rest is for programmers."""
    return (str(error).splitlines() or [type(error).__name__])[0].strip()
