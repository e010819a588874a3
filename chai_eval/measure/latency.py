"""Latency at one point of the grid: contenders in turn, every time kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Membership, Plan
from chai_eval.measure import generation
from chai_eval.measure.clock import Clock, undisturbed
from chai_eval.measure.contenders import RIVAL_NAMES, Contender
from chai_eval.measure.figures import Figures, Sample
from chai_eval.measure.room import OutOfMemory, guarded
from chai_eval.measure.settings import MeasureSettings, Point
from chai_eval.measure.statistics import Ratio, quantiles, ratio
from chai_eval.measure.turns import Turn, in_turn


@dataclass(frozen=True)
class Latency:
    """What a point gave: samples, figures of every contender by name, and those that ran out of memory among them."""

    samples: list[Sample]
    figures: dict[str, Figures]


def measure_latency(
    model: PreTrainedModel, contenders: Sequence[Contender], point: Point, settings: MeasureSettings, clock: Clock
) -> Latency:
    """Time generations of every contender, in turn within each repetition; warm-up is discarded.

    A contender that runs out of memory has no further turn.
    """
    if not contenders:  # none has room: no more has its prompt
        return Latency([], {})
    tokens = generation.prompt(model, point, settings.seed)
    failed: dict[str, OutOfMemory] = {}

    def generate(each: Contender) -> generation.Times | None:
        if each.name in failed:
            return None
        with guarded(model.device) as trouble, each.applied(model), undisturbed():
            times = generation.timed(model, tokens, point.steps, clock)
        if trouble.found is not None:
            failed[each.name] = trouble.found
            return None
        return times

    turns = list(
        in_turn({each.name: partial(generate, each) for each in contenders}, settings.repetitions, settings.warmup)
    )
    samples = [sample for turn in turns if turn.contender not in failed for sample in _samples(turn, point)]
    shares: dict[str, float] = {}
    for each in contenders:
        if each.name not in failed and any(plan.choose is not None for plan in each.plans(model).values()):
            with guarded(model.device):
                shares[each.name] = clustering_share(model, each, tokens, settings, clock)
    return Latency(
        samples,
        {
            each.name: Figures(out_of_memory=failed[each.name])
            if each.name in failed
            else replace(summary(samples, each.name, point), clustering_share=shares.get(each.name))
            for each in contenders
        },
    )


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
        plans = {layer: _watched(plan, clock, calls) for layer, plan in contender.plans(model).items()}
        with contender.applied_with(model, plans), undisturbed():
            start = clock.mark()
            generation.Generation(model, tokens).forward()
            end = clock.mark()
        if repetition >= 0:
            shares.append(sum(clock.seconds(*call) for call in calls) / clock.seconds(start, end))
    return quantiles(shares).median


def summary(samples: Sequence[Sample], name: str, point: Point) -> Figures:
    """Times and rates of a contender that has samples, and how many times as fast it is as each rival that has."""
    prefills, steps = by_repetition(samples, name)
    ttft = quantiles(prefills)
    against = {rival: ratios(samples, rival, name) for rival in RIVAL_NAMES.values() if rival != name}
    found = Figures(
        ttft,
        point.batch * point.length / ttft.median,
        times_as_fast_as={rival: each for rival, each in against.items() if each},
    )
    if not point.steps:
        return found
    return replace(
        found,
        tpot=quantiles([seconds for each in steps for seconds in each]),
        tokens_per_second=point.batch * point.steps / quantiles([sum(each) for each in steps]).median,
    )


def ratios(samples: Sequence[Sample], baseline: str, name: str) -> dict[str, Ratio]:
    """How many times as fast as a baseline a contender is: `ttft`, and `tpot` from each repetition's median token."""
    (first, first_steps), (second, second_steps) = (by_repetition(samples, each) for each in (baseline, name))
    if not first or not second:
        return {}
    found = {"ttft": ratio(first, second)}
    if first_steps[0]:
        found["tpot"] = ratio(*([quantiles(each).median for each in steps] for steps in (first_steps, second_steps)))
    return found


def by_repetition(samples: Sequence[Sample], name: str) -> tuple[list[float], list[list[float]]]:
    """A contender's times to first token, and its times per token, repetition by repetition."""
    prefills: dict[int, float] = {}
    steps: dict[int, list[float]] = {}
    for each in samples:
        if each.contender == name and each.phase == "prefill":
            prefills[each.repetition] = each.seconds
        elif each.contender == name:
            steps.setdefault(each.repetition, []).append(each.seconds)
    order = sorted(prefills)
    return [prefills[each] for each in order], [steps.get(each, []) for each in order]


def _watched(plan: Plan, clock: Clock, calls: list[tuple[Any, Any]]) -> Plan:
    """A plan that notes when its memberships are being found."""
    choose = plan.choose
    if choose is None:
        return plan

    def timed_choose(query: Tensor, key: Tensor, scaling: float) -> Membership:
        start = clock.mark()
        found = choose(query, key, scaling)
        calls.append((start, clock.mark()))
        return found

    return replace(plan, choose=timed_choose)


def _samples(turn: Turn[generation.Times | None], point: Point) -> Iterator[Sample]:
    if turn.found is not None:
        for token, seconds in enumerate((turn.found.prefill, *turn.found.steps)):
            phase = "decode" if token else "prefill"
            where = point.length, point.batch, point.new_tokens
            yield Sample(*where, turn.contender, turn.repetition, turn.place, phase, token, seconds)
