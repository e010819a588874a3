"""A measurement: every contender at every point of the grid, beside the machine's ceiling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.measure.ceiling import Ceiling, measure_ceiling
from chai_eval.measure.clock import Clock, clock_for
from chai_eval.measure.contenders import BASELINE, Contender, contenders, distinct_names
from chai_eval.measure.figures import Figures, Limit, Measured, ModelFacts, PointFigures, Sample
from chai_eval.measure.fresh import fresh_memory
from chai_eval.measure.generation import warm_up
from chai_eval.measure.latency import measure_latency
from chai_eval.measure.memory import DevicePeak, Memory, measure_memory, weight_bytes
from chai_eval.measure.progress import Progress
from chai_eval.measure.room import OutOfMemory, attempt, foreseen
from chai_eval.measure.statistics import Quantiles
from chai_eval.measure.work import Pass, pass_work, total
from chai_eval.measure_settings import MeasureSettings, Point, check_positions
from chai_eval.methods.base import plain_footprint
from chai_eval.settings import ModelSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """What a point of the grid gave: figures, and one sample for each timed forward pass."""

    figures: PointFigures
    samples: list[Sample]


def measure(
    model: PreTrainedModel,
    methods: Sequence[Contender],
    settings: MeasureSettings,
    *,
    source: ModelSettings | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure a model, in eval mode, under its own attention and under methods.

    From `source` a fresh process loads the model again, to take peak memory on a CPU; None leaves that out. Points that
    are done are taken from `progress`, others written to it. SettingError as `check_positions` raises it; RunError
    where a fresh process fails, or progress can't be written.
    """
    check_positions(settings, model)
    clock, progress = clock or clock_for(model.device), progress or Progress(None)
    entrants, notes = contenders(model, distinct_names(methods), settings)
    ceiling = progress.part("ceiling", Ceiling, lambda: measure_ceiling(model.device, model.dtype, clock=clock))
    if settings.memory and model.device.type == "cpu" and source is None:
        notes.append("peak memory: not taken, as a fresh process doesn't know how to load this model")
    grid = _Grid(model, entrants, settings, source, clock, ceiling)
    parts = [
        progress.part(f"{each.length}-{each.batch}-{each.new_tokens}", Part, partial(grid.measure, each))
        for each in settings.points
    ]
    return Measured(
        _model_facts(model, source),
        clock.name,
        torch.get_num_threads(),
        ceiling,
        [each.as_config() for each in entrants],
        notes,
        [each.figures for each in parts],
        [sample for each in parts for sample in each.samples],
    )


@dataclass(frozen=True)
class _Grid:
    """What is measured, and with what."""

    model: PreTrainedModel
    entrants: Sequence[Contender]
    settings: MeasureSettings
    source: ModelSettings | None
    clock: Clock
    ceiling: Ceiling

    def measure(self, point: Point) -> Part:
        """Every contender at one point."""
        log.info("measuring %d tokens, batch %d, %d new tokens", point.length, point.batch, point.new_tokens)
        found = {each.name: Figures(out_of_memory=foreseen(self.model, each, point)) for each in self.entrants}
        fitting = [each for each in self.entrants if found[each.name].out_of_memory is None]
        samples: list[Sample] = []
        if self.settings.latency:
            times, samples = measure_latency(self.model, fitting, point, self.settings, self.clock)
            found |= times
        for each in fitting if self.settings.memory else ():
            if found[each.name].out_of_memory is None:
                found[each.name] = self._with_memory(found[each.name], each, point)
        for each in self.entrants:
            found[each.name] = replace(found[each.name], limit=self._limits(found[each.name], each, point))
        return Part(PointFigures(point.length, point.batch, point.new_tokens, found), samples)

    def _with_memory(self, figures: Figures, each: Contender, point: Point) -> Figures:
        model, seed = self.model, self.settings.seed

        def take() -> Memory:
            if model.device.type != "cuda":
                return measure_memory(model, each, point, seed, None)
            with each.applied(model):
                warm_up(model, point)
            return measure_memory(model, each, point, seed, DevicePeak(model.device))

        taken = attempt(model.device, take)
        if isinstance(taken, OutOfMemory):
            return replace(figures, out_of_memory=taken)
        if self.source is not None and model.device.type == "cpu":
            taken = replace(taken, fresh_process=fresh_memory(self.source, each, point, seed))
        return replace(figures, memory=taken)

    def _limits(self, figures: Figures, each: Contender, point: Point) -> dict[str, Limit]:
        """What each phase takes at the machine's ceiling, and how many times as fast as MHA that allows it to be."""
        layers = each.method.footprint(self.model)
        if layers is None:
            return {}
        found: dict[str, Limit] = {}
        for figure in ("ttft", "tpot") if point.steps else ("ttft",):
            run = _pass(point, figure)
            own, plain = (pass_work(self.model, one, run) for one in (layers, plain_footprint(self.model)))
            seconds, whole = self.ceiling.seconds(own), total(own)
            times = self.ceiling.seconds(plain) / seconds
            taken: Quantiles | None = getattr(figures, figure)
            beside = figures.times_as_fast_as.get(BASELINE, {}).get(figure)
            found[figure] = Limit(
                seconds,
                whole.flops,
                whole.bytes,
                own,
                times,
                None if taken is None else seconds / taken.median,
                None if beside is None else beside.value / times,
            )
        return found


def _pass(point: Point, figure: str) -> Pass:
    """The forward pass of a phase; of decoding the one in the middle, as work grows evenly with the tokens before."""
    if figure == "ttft":
        return Pass(point.batch, point.length)
    return Pass(point.batch, 1, past=point.length + (point.steps - 1) / 2)


def _model_facts(model: PreTrainedModel, source: ModelSettings | None) -> ModelFacts:
    kept = None
    if source is not None and source.layers is not None:
        whole = source.whole_config.get("num_hidden_layers")
        kept = f"{source.layers} of its {f'{whole} ' if whole else ''}layers only"
    return ModelFacts(
        **vars(attention_shape(model)),
        name=source.name if source is not None else model.config.model_type,
        weights=source.weights if source is not None else None,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        weight_bytes=weight_bytes(model),
        layers_kept=kept,
    )
