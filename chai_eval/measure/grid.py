"""A measurement: every contender at every point of the grid, beside the machine's ceiling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from chai_eval.attention.inject import attention_shape
from chai_eval.measure.ceiling import Ceiling, measure_ceiling
from chai_eval.measure.clock import Clock, clock_for
from chai_eval.measure.contenders import BASELINE, RIVAL_NAMES, Contender, contenders, distinct_names
from chai_eval.measure.fresh import fresh_memory
from chai_eval.measure.generation import warm_up
from chai_eval.measure.latency import Sample, measure_latency, ratios, summary
from chai_eval.measure.memory import DevicePeak, measure_memory, weight_bytes
from chai_eval.measure.room import OutOfMemory, foreseen, guarded
from chai_eval.measure.settings import MeasureSettings, Point, check_positions
from chai_eval.measure.work import Pass, pass_work, total
from chai_eval.methods.base import plain_footprint
from chai_eval.settings import ModelSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """A finished measurement.

    Attributes
    ----------
    record : dict
        Plain JSON values: `model`, `machine`, `ceiling`, `contenders`, `notes` and `points`.
    samples : list of dict
        One per timed forward pass: contender, length, batch, new_tokens, repetition, turn, phase, token, seconds.
    """

    record: dict[str, Any]
    samples: list[Sample]


def check(model: PreTrainedModel, settings: MeasureSettings) -> None:
    """Refuse settings that the model can't be measured with.

    Raises
    ------
    SettingError
    """
    check_positions(settings, getattr(model.config.get_text_config(), "max_position_embeddings", None))


def measure(
    model: PreTrainedModel,
    methods: Sequence[Contender],
    settings: MeasureSettings,
    *,
    source: ModelSettings | None = None,
    clock: Clock | None = None,
    ceiling: Ceiling | None = None,
) -> Measured:
    """Measure a model under its own attention and under methods.

    Parameters
    ----------
    model : PreTrainedModel
        In eval mode.
    methods : sequence of Contender
        See `contenders.contender`.
    settings : MeasureSettings
    source : ModelSettings or None
        From which a fresh process loads the model again, to take peak memory on a CPU; None leaves that out.
    clock, ceiling
        In place of the device's own.

    Raises
    ------
    SettingError
        See `check`.
    RunError
        Where a fresh process fails.
    """
    check(model, settings)
    clock = clock or clock_for(model.device)
    entrants, notes = contenders(model, distinct_names(methods), settings)
    ceiling = ceiling or measure_ceiling(model.device, model.dtype, clock=clock)
    if settings.memory and model.device.type == "cpu" and source is None:
        notes.append("peak memory: not taken, as a fresh process doesn't know how to load this model")
    points, samples = [], []
    for point in settings.points:
        log.info("measuring %d tokens, batch %d, %d new tokens", point.length, point.batch, point.new_tokens)
        results: dict[str, dict[str, Any]] = {each.name: {} for each in entrants}
        fitting = []
        for each in entrants:
            too_much = foreseen(model, each, point)
            if too_much is None:
                fitting.append(each)
            else:
                results[each.name]["out_of_memory"] = vars(too_much)
        if settings.latency:
            samples += _latency(model, fitting, point, settings, clock, results)
        if settings.memory:
            for each in fitting:
                if "out_of_memory" not in results[each.name]:
                    _memory(model, each, point, settings, source, results[each.name])
        _limits(model, entrants, point, ceiling, results)
        points.append({**vars(point), "results": results})
    record = {
        "model": _model_facts(model, source),
        "clock": clock.name,
        "threads": torch.get_num_threads(),
        "ceiling": vars(ceiling),
        "contenders": [each.as_config() for each in entrants],
        "notes": notes,
        "points": points,
    }
    return Measured(record, samples)


def _latency(
    model: PreTrainedModel,
    entrants: Sequence[Contender],
    point: Point,
    settings: MeasureSettings,
    clock: Clock,
    results: dict[str, dict[str, Any]],
) -> list[Sample]:
    found = measure_latency(model, entrants, point, settings, clock)
    names = [each.name for each in entrants]
    for name, figures in summary(found.samples, names, point).items():
        results[name] |= figures
        if name in found.clustering:
            results[name]["clustering_share"] = found.clustering[name]
        against = {rival: ratios(found.samples, rival, name, point) for rival in RIVAL_NAMES.values() if rival != name}
        results[name]["times_as_fast_as"] = {rival: each for rival, each in against.items() if each}
    for name, trouble in found.out_of_memory.items():
        results[name]["out_of_memory"] = vars(trouble)
    return found.samples


def _memory(
    model: PreTrainedModel,
    each: Contender,
    point: Point,
    settings: MeasureSettings,
    source: ModelSettings | None,
    result: dict[str, Any],
) -> None:
    peak = DevicePeak(model.device) if model.device.type == "cuda" else None
    with guarded(model.device) as trouble:
        if peak is not None:
            with each.applied(model):
                warm_up(model, point)
        taken = measure_memory(model, each, point, settings.seed, peak)
        if peak is not None:
            taken |= {"kind": peak.name, "peak_reset": peak.reset}
        result["memory"] = taken
    if trouble.found is not None:
        result["out_of_memory"] = vars(trouble.found)
    elif peak is None and source is not None and model.device.type == "cpu":
        fresh = fresh_memory(source, each, point, settings.seed)
        if isinstance(fresh, OutOfMemory):
            result["memory"]["fresh_process"] = {"out_of_memory": vars(fresh)}
        else:
            result["memory"]["fresh_process"] = fresh


def _limits(
    model: PreTrainedModel,
    entrants: Sequence[Contender],
    point: Point,
    ceiling: Ceiling,
    results: dict[str, dict[str, Any]],
) -> None:
    """Add what each phase takes at the machine's ceiling, and how many times as fast as MHA that allows it to be."""
    for phase, figure in (("prefill", "ttft"), ("decode", "tpot")):
        if phase == "decode" and not point.steps:
            continue
        parts = pass_work(model, plain_footprint(model), _pass(point, phase))
        slowest = ceiling.seconds(parts)
        for each in entrants:
            layers = each.footprint(model)
            if layers is None:
                continue
            parts = pass_work(model, layers, _pass(point, phase))
            seconds = ceiling.seconds(parts)
            limit: dict[str, Any] = {
                "seconds": seconds,
                "flops": total(parts).flops,
                "bytes": total(parts).bytes,
                "parts": {name: vars(work) for name, work in parts.items()},
                "times_as_fast_as_mha": slowest / seconds,
            }
            if figure in results[each.name]:
                limit["share_reached"] = seconds / results[each.name][figure]["median"]
                times = results[each.name]["times_as_fast_as"].get(BASELINE, {}).get(figure)
                if times is not None:
                    limit["share_of_times"] = times["value"] / limit["times_as_fast_as_mha"]
            results[each.name].setdefault("limit", {})[figure] = limit


def _pass(point: Point, phase: str) -> Pass:
    """The forward pass of a phase; of decoding the one in the middle, as work grows evenly with the tokens before."""
    if phase == "prefill":
        return Pass(point.batch, point.length)
    return Pass(point.batch, 1, past=point.length + (point.steps - 1) / 2)


def _model_facts(model: PreTrainedModel, source: ModelSettings | None) -> dict[str, Any]:
    shape = attention_shape(model)
    facts: dict[str, Any] = {
        "name": source.name if source is not None else model.config.model_type,
        "weights": source.weights if source is not None else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "weight_bytes": weight_bytes(model),
        **vars(shape),
    }
    if source is not None and source.layers is not None:
        whole = source.whole_config.get("num_hidden_layers")
        facts["layers_kept"] = f"{source.layers} of its {f'{whole} ' if whole else ''}layers only"
    return facts
