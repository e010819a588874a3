"""Settings of a measurement; a wrong value is one line in the user's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chai_eval.errors import SettingError

KINDS = ("off", "latency", "memory", "full")
RIVALS = ("sdpa", "eager", "rows", "flash")


@dataclass(frozen=True)
class MeasureSettings:
    """What is measured, at which points of a grid, and how often.

    Attributes
    ----------
    kind
        latency, memory, or full for both.
    lengths
        Tokens of the prompt.
    batch_sizes
        Prompts at once.
    new_tokens
        Tokens generated, the first (which the prefill gives) included.
    repetitions
        Timed repetitions; in each, every contender has its turn.
    warmup
        Repetitions before those, which don't count.
    rivals
        What stands beside the methods: the model's own attention (`sdpa`, `eager`, `flash`), or every head on its own
        with this project's cache (`rows`); None for all that the machine has.
    seed
        Of the prompts' tokens.
    """

    kind: str = "full"
    lengths: tuple[int, ...] = (512,)
    batch_sizes: tuple[int, ...] = (1,)
    new_tokens: tuple[int, ...] = (32,)
    repetitions: int = 5
    warmup: int = 1
    rivals: tuple[str, ...] | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.kind not in KINDS[1:]:
            raise _wrong("name", self.kind, ", ".join(KINDS))
        for name in ("lengths", "batch_sizes", "new_tokens"):
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)))
        _whole("repetitions", self.repetitions, 1)
        _whole("warmup", self.warmup, 0)
        _whole("seed", self.seed, 0, 2**63 - 1)
        if self.rivals is not None:
            object.__setattr__(self, "rivals", _rivals(self.rivals))

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

    def as_config(self) -> dict[str, Any]:
        """Plain JSON values, as records keep them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
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
    """Settings from a file of `conf/measure` with the user's changes; None for `off`.

    Raises
    ------
    SettingError
        For a setting that is unknown or has a wrong value.
    """
    given = dict(values)
    kind = given.pop("name", "off")
    if kind not in KINDS:
        raise _wrong("name", kind, ", ".join(KINDS))
    known = [name for name in MeasureSettings.__dataclass_fields__ if name != "kind"]
    for name in given:
        if kind == "off":
            raise given_while_off(f"measure.{name}")
        if name not in known:
            raise SettingError(f"measure.{name}: unknown; allowed: {', '.join(known)}")
    if given.get("rivals") == "auto":
        given["rivals"] = None
    return None if kind == "off" else MeasureSettings(kind=kind, **given)


def given_while_off(setting: str) -> SettingError:
    """Say that a setting of measurements has no meaning where nothing is measured."""
    return SettingError(f"{setting}: given with measure=off; allowed: measure=latency, memory or full")


def check_positions(settings: MeasureSettings, positions: int | None) -> None:
    """Refuse prompts that, with what is generated after them, go beyond what the model reads.

    Parameters
    ----------
    positions : int or None
        The model's `max_position_embeddings`; None where it knows no end.

    Raises
    ------
    SettingError
    """
    new = max(settings.new_tokens)
    longest = max(settings.lengths)
    if positions is None or longest + new <= positions:
        return
    allowed = f"1 to {positions - new}" if new < positions else f"fewer measure.new_tokens than {positions}"
    raise SettingError(
        f"measure.lengths: {longest} given, with {new} new tokens more than the model's {positions} positions; "
        f"allowed: {allowed}, or a longer model.config.max_position_embeddings"
    )


def _whole(name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, value, f"whole numbers from {least} to {most}")


def _whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    values = [given] if isinstance(given, int) else given
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise _wrong(name, given, "whole numbers from 1, as [512,1024]")
    for value in values:
        _whole(name, value, 1)
    return tuple(dict.fromkeys(values))


def _rivals(given: Any) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, Sequence) or any(name not in RIVALS for name in names):
        raise _wrong("rivals", given, f"auto, or some of [{','.join(RIVALS)}]")
    return tuple(dict.fromkeys(names))


def _wrong(name: str, given: Any, allowed: str) -> SettingError:
    return SettingError(f"measure.{name}: {given!r} given; allowed: {allowed}")
