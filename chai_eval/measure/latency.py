"""Latency at one point of the grid: contenders in turn, every time kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Membership, Plan, ProbePlan, apply
from chai_eval.measure import generation
from chai_eval.measure.clock import Clock
from chai_eval.measure.contenders import Contender
from chai_eval.measure.room import OutOfMemory, guarded
from chai_eval.measure.settings import MeasureSettings, Point
from chai_eval.measure.statistics import quantiles, ratio
from chai_eval.measure.turns import turns

# One timed forward pass.
Sample = dict[str, Any]


@dataclass(frozen=True)
class Latency:
    """What a point gave: samples (one per forward pass), clustering shares, and who ran out of memory."""

    samples: list[Sample]
    clustering: dict[str, float]
    out_of_memory: dict[str, OutOfMemory]


def measure_latency(
    model: PreTrainedModel, contenders: Sequence[Contender], point: Point, settings: MeasureSettings, clock: Clock
) -> Latency:
    """Time generations of every contender, in turn within each repetition; warm-up is discarded.

    A contender that runs out of memory has no further turn.
    """
    if not contenders:  # none has room: no more has its prompt
        return Latency([], {}, {})
    tokens = generation.prompt(model, point, settings.seed)
    samples: list[Sample] = []
    failed: dict[str, OutOfMemory] = {}
    for repetition in range(-settings.warmup, settings.repetitions):
        for order, each in enumerate(turns(contenders, repetition)):
            if each.name in failed:
                continue
            with guarded(model.device) as trouble, each.applied(model), undisturbed():
                times = generation.timed(model, tokens, point.steps, clock)
            if trouble.found is not None:
                failed[each.name] = trouble.found
                samples = [sample for sample in samples if sample["contender"] != each.name]
            elif repetition >= 0:
                samples += _samples(each, point, repetition, order, times)
    shares = {}
    for each in contenders:
        if each.name not in failed and any(plan.probe_tokens for plan in each.hooks(model).plans.values()):
            with guarded(model.device) as trouble:
                shares[each.name] = clustering_share(model, each, tokens, settings, clock)
    return Latency(samples, shares, failed)


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
        hooks = contender.hooks(model)
        hooks.plans = {layer: _watched(plan, clock, calls) for layer, plan in hooks.plans.items()}
        with apply(model, hooks), undisturbed():
            start = clock.mark()
            generation.Generation(model, tokens).prefill()
            end = clock.mark()
        if repetition >= 0:
            shares.append(sum(clock.seconds(*call) for call in calls) / clock.seconds(start, end))
    return quantiles(shares)["median"]


def summary(samples: Sequence[Sample], names: Sequence[str], point: Point) -> dict[str, dict[str, Any]]:
    """Figures of every contender that has samples: times in seconds, rates in tokens a second.

    Returns
    -------
    dict
        By contender: `ttft` and `tpot` (quantiles over generations and over tokens), `prefill_tokens_per_second`,
        `tokens_per_second` (of decoding, all requests together).
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        prefills, steps = by_repetition(samples, name)
        if not prefills:
            continue
        ttft = quantiles(prefills)
        found[name] = {
            "ttft": ttft,
            "prefill_tokens_per_second": point.batch * point.length / ttft["median"],
        }
        if point.steps:
            totals = [sum(each) for each in steps]
            found[name]["tpot"] = quantiles([seconds for each in steps for seconds in each])
            found[name]["tokens_per_second"] = point.batch * point.steps / quantiles(totals)["median"]
    return found


def ratios(samples: Sequence[Sample], baseline: str, name: str, point: Point) -> dict[str, dict[str, Any]]:
    """How many times as fast as a baseline a contender is: `ttft`, and `tpot` from each repetition's median token."""
    first, second = by_repetition(samples, baseline), by_repetition(samples, name)
    if not first[0] or not second[0]:
        return {}
    found = {"ttft": vars(ratio(first[0], second[0]))}
    if point.steps:
        medians = [[quantiles(each)["median"] for each in steps] for _, steps in (first, second)]
        found["tpot"] = vars(ratio(*medians))
    return found


def by_repetition(samples: Sequence[Sample], name: str) -> tuple[list[float], list[list[float]]]:
    """A contender's times to first token, and its times per token, repetition by repetition."""
    prefills: dict[int, float] = {}
    steps: dict[int, list[float]] = {}
    for sample in samples:
        if sample["contender"] == name:
            if sample["phase"] == "prefill":
                prefills[sample["repetition"]] = sample["seconds"]
            else:
                steps.setdefault(sample["repetition"], []).append(sample["seconds"])
    order = sorted(prefills)
    return [prefills[each] for each in order], [steps.get(each, []) for each in order]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without Python's garbage collector, which would stop some token or other."""
    gc.collect()
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


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


def _samples(each: Contender, point: Point, repetition: int, order: int, times: generation.Times) -> Iterator[Sample]:
    about = {"contender": each.name, **vars(point), "repetition": repetition, "turn": order}
    yield {**about, "phase": "prefill", "token": 0, "seconds": times.prefill}
    for index, seconds in enumerate(times.steps, start=1):
        yield {**about, "phase": "decode", "token": index, "seconds": seconds}
