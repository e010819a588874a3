"""Typed settings of a calibration; a wrong value is one line in the user's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chai_eval.calibration.sums import Algorithm, FeatureKind
from chai_eval.errors import SettingError
from chai_eval.settings import ModelSettings, parse_model, unknown, wrong

RULES = ("budget", "elbow", "tolerance")


@dataclass(frozen=True)
class CalibrationSettings:
    """Everything that a calibration is told; `conf/calibrate.yaml` says what each setting means."""

    model: ModelSettings
    text: str
    samples: int
    tokens: int
    seed: int
    features: FeatureKind
    algorithm: Algorithm
    starts: int
    probe_tokens: int
    query_rows: int
    predictor: bool
    sensitivity_samples: int
    sensitivity_counts: int
    rule: str
    saving: tuple[float, ...]
    elbow: tuple[float, ...]
    tolerance: tuple[float, ...]
    batch_tokens: int
    out: Path | None
    debug: bool

    def collecting(self) -> dict[str, Any]:
        """Settings that have a say in what is collected, as plain JSON values; the rule comes after it."""
        later = ("rule", "saving", "elbow", "tolerance", "out", "debug", "sensitivity_counts")
        return {key: value for key, value in asdict(self).items() if key not in (*later, "model")}


def parse_calibration(config: Mapping[str, Any]) -> CalibrationSettings:
    """Make settings from the composed configuration as plain containers.

    Raises
    ------
    SettingError
        For the first setting that is unknown, missing or has a wrong value.
    """
    values = dict(config)
    for name in values:
        if name not in CalibrationSettings.__dataclass_fields__:
            raise unknown(str(name), str(name), CalibrationSettings.__dataclass_fields__)
    out = _text(values, "out", optional=True)
    return CalibrationSettings(
        model=parse_model(values["model"]),
        text=_text(values, "text") or "auto",
        samples=_whole(values, "samples", 1),
        tokens=_whole(values, "tokens", 8),
        seed=_whole(values, "seed", 0),
        features=_one_of(values, "features", ("last_row", "probe")),
        algorithm=_one_of(values, "algorithm", ("kmeans", "average")),
        starts=_whole(values, "starts", 1),
        probe_tokens=_whole(values, "probe_tokens", 1),
        query_rows=_whole(values, "query_rows", 1),
        predictor=_flag(values, "predictor"),
        sensitivity_samples=_whole(values, "sensitivity_samples", 1),
        sensitivity_counts=_whole(values, "sensitivity_counts", 1),
        rule=_one_of(values, "rule", RULES),
        saving=_three(values, "saving", 0, 0.5),
        elbow=_three(values, "elbow", 0, 2),
        tolerance=_three(values, "tolerance", 0, 1),
        batch_tokens=_whole(values, "batch_tokens", 1),
        out=None if out is None else Path(out).expanduser(),
        debug=_flag(values, "debug"),
    )


def _text(values: Mapping[str, Any], name: str, *, optional: bool = False) -> str | None:
    value = values[name]
    if (value is None and not optional) or not isinstance(value, str | None) or value == "":
        raise wrong(name, value, "a text" + (" or null" if optional else ""))
    return value


def _whole(values: Mapping[str, Any], name: str, minimum: int) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise wrong(name, value, f"a whole number from {minimum} up")
    return value


def _flag(values: Mapping[str, Any], name: str) -> bool:
    if not isinstance(values[name], bool):
        raise wrong(name, values[name], "true, false")
    return values[name]


def _one_of(values: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> Any:
    if values[name] not in allowed:
        raise wrong(name, values[name], ", ".join(allowed))
    return values[name]


def _three(values: Mapping[str, Any], name: str, low: float, high: float) -> tuple[float, ...]:
    given = values[name]
    numbers = given if isinstance(given, list | tuple) else []
    if len(numbers) != 3 or not all(
        isinstance(each, int | float) and not isinstance(each, bool) and low <= each <= high for each in numbers
    ):
        raise wrong(name, given, f"three numbers from {low} to {high}, for conservative, balanced, aggressive")
    return tuple(float(each) for each in numbers)


def check_tokens(settings: CalibrationSettings, longest: int | None) -> None:
    """Refuse samples that are longer than the model reads.

    Raises
    ------
    SettingError
    """
    if longest is not None and settings.tokens > longest:
        raise SettingError(f"tokens: {settings.tokens} given; allowed: 8 to {longest}, the longest this model reads")
