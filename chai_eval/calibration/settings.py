"""Typed settings of the offline phase; a wrong value is one line in the user's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from chai_eval.calibration.sums import Algorithm, FeatureKind
from chai_eval.errors import SettingError
from chai_eval.methods.clusters import check_clusters
from chai_eval.settings import ModelSettings, parse_model
from chai_eval.values import unknown, wrong

RULES = ("budget", "elbow", "tolerance")


@dataclass(frozen=True)
class OfflineSettings:
    """What calibration and analysis are both told; their files in `conf/` say what each setting means."""

    model: ModelSettings
    text: str
    samples: int
    tokens: int
    seed: int
    features: FeatureKind
    algorithm: Algorithm
    starts: int
    probe_tokens: int
    batch_tokens: int
    out: Path | None
    debug: bool

    def as_config(self) -> dict[str, Any]:
        """All settings but the model's as plain JSON values."""
        plain = {key: value for key, value in asdict(self).items() if key not in ("model", "debug", "out")}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


@dataclass(frozen=True)
class CalibrationSettings(OfflineSettings):
    """Everything that a calibration is told."""

    query_rows: int
    predictor: bool
    sensitivity_samples: int
    rule: str
    saving: tuple[float, ...]
    elbow: tuple[float, ...]
    tolerance: tuple[float, ...]

    def collecting(self) -> dict[str, Any]:
        """Settings that have a say in what is collected; the rule comes after it."""
        later = ("rule", "saving", "elbow", "tolerance")
        return {key: value for key, value in self.as_config().items() if key not in later}


@dataclass(frozen=True)
class AnalysisSettings(OfflineSettings):
    """Everything that an analysis is told."""

    longest_probe: int
    counts: Any
    figures: bool | None


def parse_calibration(config: Mapping[str, Any]) -> CalibrationSettings:
    """Make settings from the composed configuration as plain containers.

    Raises
    ------
    SettingError
        For the first setting that is unknown, missing or has a wrong value.
    """
    return CalibrationSettings(**_parse(config, CalibrationSettings))


def parse_analysis(config: Mapping[str, Any]) -> AnalysisSettings:
    """Make settings from the composed configuration; raises as `parse_calibration` does."""
    return AnalysisSettings(**_parse(config, AnalysisSettings))


def check_tokens(tokens: int, model: PreTrainedModel) -> None:
    """Refuse samples that are longer than the model reads.

    Raises
    ------
    SettingError
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise SettingError(f"tokens: {tokens} given; allowed: 8 to {longest}, the longest this model reads")


def _parse(config: Mapping[str, Any], kind: type[OfflineSettings]) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    for name in config:
        if name not in names:
            raise unknown(str(name), str(name), names)
    return {name: _READ[name](name, config[name]) for name in names}


def _whole(minimum: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise wrong(name, value, f"a whole number from {minimum} up")
        return value

    return read


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in allowed:
            raise wrong(name, value, ", ".join(allowed))
        return str(value)

    return read


def _three(low: float, high: float) -> Callable[[str, Any], tuple[float, ...]]:
    def read(name: str, value: Any) -> tuple[float, ...]:
        numbers = value if isinstance(value, list | tuple) else []
        if len(numbers) != 3 or not all(
            isinstance(each, int | float) and not isinstance(each, bool) and low <= each <= high for each in numbers
        ):
            raise wrong(name, value, f"three numbers from {low} to {high}, for conservative, balanced, aggressive")
        return tuple(float(each) for each in numbers)

    return read


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(name, value, "a text")
    return value


def _folder(name: str, value: Any) -> Path | None:
    return None if value is None else Path(_text(name, str(value))).expanduser()


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true, false")
    return value


def _flag_or_null(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise wrong(name, value, "true, false, null")
    return value


def _counts(name: str, value: Any) -> Any:
    check_clusters(value)
    return value


_READ: Mapping[str, Callable[[str, Any], Any]] = {
    "model": lambda name, value: parse_model(value),
    "text": _text,
    "samples": _whole(1),
    "tokens": _whole(8),
    "seed": _whole(0),
    "features": _one_of("last_row", "probe"),
    "algorithm": _one_of("kmeans", "average"),
    "starts": _whole(1),
    "probe_tokens": _whole(1),
    "batch_tokens": _whole(1),
    "out": _folder,
    "debug": _flag,
    "query_rows": _whole(1),
    "predictor": _flag,
    "sensitivity_samples": _whole(1),
    "rule": _one_of(*RULES),
    "saving": _three(0, 0.5),
    "elbow": _three(0, 2),
    "tolerance": _three(0, 1),
    "longest_probe": _whole(1),
    "counts": _counts,
    "figures": _flag_or_null,
}
