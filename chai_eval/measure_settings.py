"""Settings of a measurement; a wrong value is one line in the user's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chai_eval.errors import SettingError, wrong
from chai_eval.schema import SETTINGS, Recorded, defaults, read, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("off", "latency", "memory", "full")
MOST = 2**31 - 1

Kind = Literal["latency", "memory", "full"]
Rival = Literal["sdpa", "eager", "rows", "flash"]


def _once(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(dict.fromkeys(values))


def _rivals(given: Any) -> Any:
    return None if given == "auto" else given.split(",") if isinstance(given, str) else given


Whole = Annotated[int, Field(strict=True, ge=1, le=MOST)]
# One number stands for a list of it, and no point is measured twice.
Axis = Annotated[
    tuple[Whole, ...],
    BeforeValidator(lambda given: [given] if isinstance(given, int) else given),
    Field(min_length=1),
    AfterValidator(_once),
]


@dataclass(frozen=True, config=SETTINGS)
class MeasureSettings(Recorded):
    """What is measured (latency, memory, or full for both), at which points of a grid, and how often."""

    kind: Kind = "full"
    lengths: Axis = setting((512,), "tokens of the prompt")
    batch_sizes: Axis = setting((1,), "prompts at once")
    new_tokens: Axis = setting((32,), "tokens generated, the first (which the prefill gives) included")
    repetitions: Whole = setting(5, "timed repetitions; in each, every contender has its turn")
    warmup: Annotated[int, Field(strict=True, ge=0, le=MOST)] = setting(1, "repetitions before those, not counted")
    rivals: Annotated[tuple[Rival, ...] | None, BeforeValidator(_rivals), AfterValidator(_once)] = setting(
        None,
        "beside the method: the model's own attention as [sdpa,eager,flash], or [rows]: every head, with our cache; "
        "auto: all there are",
        composed="auto",
        allowed="auto, or some of [sdpa,eager,rows,flash]",
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] = setting(
        1234, "of the prompts' tokens", allowed=f"whole numbers from 0 to {2**63 - 1}"
    )

    @property
    def latency(self) -> bool:
        """Whether times are measured."""
        return self.kind in ("latency", "full")

    @property
    def memory(self) -> bool:
        """Whether memory is measured."""
        return self.kind in ("memory", "full")

    @property
    def points(self) -> list[Point]:
        """The grid, shortest first."""
        return [
            Point(length, batch, new)
            for length in self.lengths
            for batch in self.batch_sizes
            for new in self.new_tokens
        ]


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of the grid: tokens of each prompt, prompts, and tokens generated after each."""

    length: int
    batch: int
    new_tokens: int

    @property
    def steps(self) -> int:
        """Forward passes after the prefill, each for one token: the prefill itself gives the first."""
        return self.new_tokens - 1


def parse_measure(values: Mapping[str, Any]) -> MeasureSettings | None:
    """Settings from a file of `conf/measure` with the user's changes, None for `off`; SettingError for a wrong one."""
    given = dict(values)
    kind = given.pop("name", "off")
    if kind not in KINDS:
        raise wrong("measure.name", kind, ", ".join(KINDS))
    known = defaults(MeasureSettings)
    for name in given:
        if kind == "off":
            raise given_while_off(f"measure.{name}")
        if name not in known:
            raise SettingError(f"measure.{name}: unknown; allowed: {', '.join(known)}")
    return None if kind == "off" else read(MeasureSettings, {"kind": kind, **given}, "measure.")


def given_while_off(setting: str) -> SettingError:
    """Say that a setting of measurements has no meaning where nothing is measured."""
    return SettingError(f"{setting}: given with measure=off; allowed: measure=latency, memory or full")


def check_positions(settings: MeasureSettings, model: PreTrainedModel) -> None:
    """Refuse, by SettingError, prompts that with what is generated after them go beyond the model's positions."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    new, longest = max(settings.new_tokens), max(settings.lengths)
    if positions is None or longest + new <= positions:
        return
    allowed = f"1 to {positions - new}" if new < positions else f"fewer measure.new_tokens than {positions}"
    raise SettingError(
        f"measure.lengths: {longest} given, with {new} new tokens more than the model's {positions} positions; "
        f"allowed: {allowed}, or a longer model.config.max_position_embeddings"
    )
