"""Latency at one point of the grid: contenders in turn, every time kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Membership, Plan, ProbePlan, apply
from chai_eval.measure import generation
from chai_eval.measure.clock import Clock, Turn, in_turn, undisturbed
from chai_eval.measure.contenders import RIVAL_NAMES, Contender
from chai_eval.measure.figures import Figures, Sample
from chai_eval.measure.generation import Times
from chai_eval.measure.room import OutOfMemory, attempt
from chai_eval.measure.statistics import Ratio, quantiles, ratio
from chai_eval.measure_settings import MeasureSettings, Point


def measure_latency(
    model: PreTrainedModel, contenders: Sequence[Contender], point: Point, settings: MeasureSettings, clock: Clock
) -> tuple[dict[str, Figures], list[Sample]]:
    """Time generations of every contender, in turn within each repetition; warm-up is discarded.

    A contender that runs out of memory has no further turn, and no samples (one is for each forward pass).
    """
    if not contenders:  # none has room: no more has its prompt
        return {}, []
    tokens = generation.prompt(model, point, settings.seed)
    failed: dict[str, OutOfMemory] = {}

    def generate(each: Contender) -> Times:
        with each.applied(model), undisturbed():
            return generation.timed(model, tokens, point.steps, clock)

    def take_turn(each: Contender) -> Times | None:
        if each.name not in failed:
            found = attempt(model.device, partial(generate, each))
            if isinstance(found, Times):
                return found
            failed[each.name] = found
        return None

    own_turns = {each.name: partial(take_turn, each) for each in contenders}
    turns = list(in_turn(own_turns, settings.repetitions, settings.warmup))
    taken: dict[str, list[Times]] = {}
    samples: list[Sample] = []
    for turn in turns:
        if turn.found is not None and turn.contender not in failed:
            taken.setdefault(turn.contender, []).append(turn.found)
            samples += _samples(turn, turn.found, point)
    figures = {name: Figures(out_of_memory=trouble) for name, trouble in failed.items()}
    for each in (each for each in contenders if each.name in taken):
        figures[each.name] = summary(taken, each.name, point)
        if any(plan.probe_tokens for plan in each.method.hooks(model).plans.values()):
            share = attempt(model.device, partial(clustering_share, model, each, tokens, settings, clock))
            if isinstance(share, float):
                figures[each.name] = replace(figures[each.name], clustering_share=share)
    return figures, samples


@torch.inference_mode()
def clustering_share(
    model: PreTrainedModel, contender: Contender, tokens: Tensor, settings: MeasureSettings, clock: Clock
) -> float:
    """Share of the time to first token that goes into finding memberships, in a pass of its own.

    The calls themselves are timed, beginning to end; the smallest share of the repetitions would hide what clustering
    costs and the largest what a neighbour does, so it is the median.
    """
    shares = []
    for repetition in range(-settings.warmup, settings.repetitions):
        calls: list[tuple[Any, Any]] = []
        hooks = contender.method.hooks(model)
        hooks.plans = {layer: _watched(plan, clock, calls) for layer, plan in hooks.plans.items()}
        with apply(model, hooks), undisturbed():
            start = clock.mark()
            generation.Generation(model, tokens).forward()
            end = clock.mark()
        if repetition >= 0:
            shares.append(sum(clock.seconds(*call) for call in calls) / clock.seconds(start, end))
    return quantiles(shares).median


def summary(taken: Mapping[str, Sequence[Times]], name: str, point: Point) -> Figures:
    """Times and rates of a contender, and how many times as fast it is as each rival, from times by repetition."""
    own = taken[name]
    ttft = quantiles([each.prefill for each in own])
    rivals = [rival for rival in RIVAL_NAMES.values() if rival in taken and rival != name]
    found = Figures(
        ttft,
        point.batch * point.length / ttft.median,
        times_as_fast_as={rival: _ratios(taken[rival], own) for rival in rivals},
    )
    if not point.steps:
        return found
    return replace(
        found,
        decoding=own[0].decoding,
        tpot=quantiles([seconds for each in own for seconds in each.steps]),
        tokens_per_second=point.batch * point.steps / quantiles([sum(each.steps) for each in own]).median,
    )


def _ratios(baseline: Sequence[Times], other: Sequence[Times]) -> dict[str, Ratio]:
    """How many times as fast as a baseline something is: `ttft`, and `tpot` from each repetition's median token."""
    found = {"ttft": ratio(*([each.prefill for each in times] for times in (baseline, other)))}
    if baseline[0].steps:
        found["tpot"] = ratio(*([quantiles(each.steps).median for each in times] for times in (baseline, other)))
    return found


def _watched(plan: Plan, clock: Clock, calls: list[tuple[Any, Any]]) -> Plan:
    """A plan that notes when its memberships are being found."""
    if not isinstance(plan, ProbePlan):
        return plan
    cluster = plan.cluster

    def timed(query: Tensor, key: Tensor, scaling: float) -> Membership:
        start = clock.mark()
        found = cluster(query, key, scaling)
        calls.append((start, clock.mark()))
        return found

    return replace(plan, cluster=timed)


def _samples(turn: Turn[Any], times: Times, point: Point) -> Iterator[Sample]:
    where = point.length, point.batch, point.new_tokens, turn.contender, turn.repetition, turn.place
    for token, seconds in enumerate((times.prefill, *times.steps)):
        yield Sample(*where, "decode" if token else "prefill", token, seconds)
