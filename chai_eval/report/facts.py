"""The four facts that decide: do heads that share attend alike, what is lost, what is held, how fast it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chai_eval.report.heads import Heads
from chai_eval.report.pairs import Pair
from chai_eval.report.ranking import Pooled, pool
from chai_eval.report.records import Records

BASELINE = "mha (sdpa)"
MIB = 1 << 20


@dataclass(frozen=True)
class Fact:
    """A fact as a reader sees it: `value` in a word or two, `says` in a sentence, and the record behind it.

    `elsewhere` names another model that it was measured on; `make` is the command that finds out what is unknown.
    """

    title: str
    value: str
    says: str
    path: Path | None = None
    elsewhere: str | None = None
    make: str | None = None


def facts(model: str, method: str, records: Records, found: Sequence[Pair], heads: Heads | None) -> list[Fact]:
    """The four facts about a method on a model, each from a record, or with the command that makes one."""
    return [
        _alike(model, heads),
        _quality(model, method, found),
        _memory(model, method, records, found),
        _latency(model, method, records),
    ]


def _alike(model: str, heads: Heads | None) -> Fact:
    title = "Do heads that share attend alike?"
    if heads is None:
        return Fact(title, "not known", "No analysis is recorded.", make=f"python -m chai_eval analyse model={model}")
    shared, apart = heads.means()
    if math.isnan(shared):
        return Fact(title, "no sharing", "Every head is a cluster by itself.", heads.path)
    says = f"{heads.measure}, mean over pairs of a layer: {shared:.2f} within clusters, {apart:.2f} across them."
    return Fact(title, f"{shared:.2f} against {apart:.2f}", says, heads.path)


def _quality(model: str, method: str, found: Sequence[Pair]) -> Fact:
    title, pooled = "What is lost?", pooled_of(model, method, found)
    if pooled is None:
        return Fact(title, "not known", "No task is scored.", make=f"python -m chai_eval model={model} method={method}")
    lost, worst = pooled.difference, worst_task(model, pooled.label, found)
    says = (
        f"{pooled.label}, {pooled.documents} documents of {pooled.tasks} tasks: 95 % interval {lost.low:+.1f} to "
        f"{lost.high:+.1f} points"
        + (f", exact McNemar p {p_text(pooled.difference.p)}" if pooled.difference.p is not None else "")
        + "."
    )
    if worst is not None and worst.row.difference is not None:
        says += f" Worst: {worst.task} {worst.row.difference.points:+.1f}."
    return Fact(title, f"{lost.points:+.1f} points", says, _first(model, pooled.label, found).result.path)


def pooled_of(model: str, method: str, found: Sequence[Pair]) -> Pooled | None:
    """A method's scores over all tasks, at the setting that most tasks were scored with."""
    own = pool([each for each in found if each.model == model and each.method == method])
    return max(own, key=lambda each: (each.tasks, each.documents, each.label), default=None)


def worst_task(model: str, label: str, found: Sequence[Pair]) -> Pair | None:
    """The task on which a method loses most points."""
    own = [each for each in found if each.model == model and each.label == label and each.right is not None]
    return min(own, key=lambda each: each.row.difference.points if each.row.difference else 0.0, default=None)


def p_text(p: float | None) -> str:
    """A p value with two digits."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def _first(model: str, label: str, found: Sequence[Pair]) -> Pair:
    return next(each for each in found if each.model == model and each.label == label)


def _memory(model: str, method: str, records: Records, found: Sequence[Pair]) -> Fact:
    title = "Is memory really smaller?"
    for path, measured in _measured(records):
        if measured["model"]["name"] == model and (both := _caches(measured, method)):
            point, plain, ours = both
            return Fact(title, *_held(plain, ours, f"at {point['length']} tokens"), path)
    for each in records.benchmarks:
        for row in each.content["rows"]:
            details = row.get("details") or {}
            if BASELINE in details and method in details and "cache" in details[method]:
                plain, ours = (details[name] for name in (BASELINE, method))
                where = str(row["setting"]).partition(",")[0]
                return Fact(title, *_held(plain, ours, str(row["setting"])), each.path, where)
    shares = [each.share("held") for each in found if each.model == model and each.method == method]
    says = "No memory has been measured."
    if shares and shares[0] is not None:
        says += f" By the formula {100 * shares[0]:.1f} % of the K,V bytes are held."
    return Fact(title, "not measured", says, make=f"python -m chai_eval measure model={model} method={method}")


def _held(plain: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> tuple[str, str]:
    before, after = (each["cache"]["allocated_bytes"] for each in (plain, ours))
    says = f"K,V cache allocated {where}: {before / MIB:.1f} MiB, then {after / MIB:.1f} MiB"
    settled = [_settled(each) for each in (plain, ours)]
    if None not in settled:
        says += "; the process that holds it grew by {:.1f} MiB, then by {:.1f} MiB".format(
            *(each / MIB for each in settled if each is not None)
        )
    return f"{100 * (after / before - 1):+.1f} %", f"{says}."


def _settled(memory: Mapping[str, Any]) -> float | None:
    prefill = (memory.get("process") or {}).get("prefill") or {}
    value = prefill.get("settled_above_before_bytes")
    return None if value is None else float(value)


def _measured(records: Records) -> Iterable[tuple[Path, Mapping[str, Any]]]:
    """Measurements, those of a user's results first."""
    for each in records.measurements:
        yield each.path / "record.json", each.content
    for each in records.benchmarks:
        if "measured" in each.content:
            yield each.path, each.content["measured"]


def _caches(
    measured: Mapping[str, Any], method: str
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]] | None:
    """The longest point at which memory was measured with and without a method, and both as `_held` reads them."""
    for point in sorted(measured["points"], key=lambda each: -each["length"]):
        names = BASELINE, _name_of(measured, method)
        plain, ours = ((point["results"].get(name) or {}).get("memory") for name in names)
        if plain and ours:
            return point, _cache_and_process(plain), _cache_and_process(ours)
    return None


def _cache_and_process(memory: Mapping[str, Any]) -> dict[str, Any]:
    fresh = memory.get("fresh_process") or {}
    return {"cache": memory["prefill"]["cache"], "process": fresh if "prefill" in fresh else memory}


def _name_of(measured: Mapping[str, Any], method: str) -> str:
    """What a method is called in a measurement: the first contender that is it."""
    names = [each["name"] for each in measured["contenders"] if each["method"] == method and not each.get("attention")]
    return names[0] if names else method


def _latency(model: str, method: str, records: Records) -> Fact:
    """Over all points of the model's own measurements; where it has none, of the model that has most."""
    title = "Is it faster in the same stack?"
    found: dict[str, list[tuple[Path, Mapping[str, Any], Mapping[str, Any]]]] = {}
    for path, measured in _measured(records):
        for point in measured["points"]:
            result = point["results"].get(_name_of(measured, method)) or {}
            ratios = (result.get("times_as_fast_as") or {}).get(BASELINE) or {}
            if {"ttft", "tpot"} <= set(ratios):
                found.setdefault(measured["model"]["name"], []).append((path, measured["model"], ratios))
    if not found:
        make = f"python -m chai_eval measure model={model} method={method}"
        return Fact(title, "not measured", "No latency has been measured.", make=make)
    name = model if model in found else max(found, key=lambda each: (len(found[each]), each))
    points = found[name]
    about = sorted({f"{one['dtype']} on {one['device']}" for _, one, _ in points})
    kept = {f", {one['layers_kept']}" for _, one, _ in points if one.get("layers_kept")}
    said = ", ".join(f"{of} {_range([one[of.lower()]['value'] for *_, one in points])}" for of in ("TTFT", "TPOT"))
    says = (
        f"{name}{''.join(sorted(kept))}, {' and '.join(about)}, {len(points)} points, beside the model's own attention "
        f"(sdpa): {said}; above 1 is faster."
    )
    value = f"{_range([one['tpot']['value'] for *_, one in points])} a token"
    return Fact(title, value, says, points[0][0], None if name == model else name)


def _range(values: Sequence[float]) -> str:
    low, high = (f"{each:.2f}×" for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
