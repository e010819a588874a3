"""What a measurement finds: frozen figures, which `serialise` turns into records and back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from chai_eval.attention.shape import AttentionShape
from chai_eval.measure.ceiling import Ceiling
from chai_eval.measure.memory import Memory
from chai_eval.measure.room import OutOfMemory
from chai_eval.measure.serialise import to_json
from chai_eval.measure.statistics import Quantiles, Ratio
from chai_eval.measure.work import Work
from chai_eval.measure_settings import Point


@dataclass(frozen=True)
class Limit:
    """What a phase takes at least, its parts (see `work.pass_work`) one after the other at the machine's ceiling.

    `times_as_fast_as_mha` is the most that counted work allows, over the model's own attention; `share_reached` and
    `share_of_times` say how much of the ceiling, and of that most, was measured.
    """

    seconds: float
    flops: float
    bytes: float
    parts: dict[str, Work]
    times_as_fast_as_mha: float
    share_reached: float | None = None
    share_of_times: float | None = None


@dataclass(frozen=True)
class Figures:
    """What a contender gave at a point; None where it was not measured or does not exist.

    `ttft` is the time to first token, over generations, `tpot` that per output token, over tokens, in seconds. Tokens
    per second are those of the prefill, and of decoding, all requests together. `clustering_share` is that part of the
    time to first token which goes into finding memberships. `decoding` says, on a GPU, whether steps were captured as
    one graph, or why not. `times_as_fast_as` is by rival, then by `ttft` and `tpot`; `limit` by these, and empty for a
    method whose saving is only simulated.
    """

    ttft: Quantiles | None = None
    prefill_tokens_per_second: float | None = None
    tpot: Quantiles | None = None
    tokens_per_second: float | None = None
    decoding: str | None = None
    clustering_share: float | None = None
    times_as_fast_as: dict[str, dict[str, Ratio]] = field(default_factory=dict)
    memory: Memory | None = None
    limit: dict[str, Limit] = field(default_factory=dict)
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True)
class PointFigures(Point):
    """A point of the grid and what each contender gave there, by name."""

    results: dict[str, Figures]


@dataclass(frozen=True)
class Sample(Point):
    """One timed forward pass; `turn` is the contender's place in its repetition, `token` 0 in the prefill."""

    contender: str
    repetition: int
    turn: int
    phase: str
    token: int
    seconds: float


@dataclass(frozen=True)
class ModelFacts(AttentionShape):
    """The model that was measured; `layers_kept` says so where only its first layers were."""

    name: str
    weights: str | None
    dtype: str
    device: str
    weight_bytes: int
    layers_kept: str | None = None


@dataclass(frozen=True)
class Measured:
    """A finished measurement; `contenders` has name and settings of each, `notes` what was not measured and why."""

    model: ModelFacts
    clock: str
    threads: int
    ceiling: Ceiling
    contenders: list[dict[str, Any]]
    notes: list[str]
    points: list[PointFigures]
    samples: list[Sample] = field(default_factory=list)

    @property
    def record(self) -> dict[str, Any]:
        """As JSON values, without the samples."""
        return to_json(replace(self, samples=[]))
