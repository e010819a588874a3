"""Tables of a measurement: latency, memory, and what the machine allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from chai_eval.markdown import table
from chai_eval.measure.contenders import BASELINE, RIVAL_NAMES
from chai_eval.measure.figures import Figures, Measured, PointFigures
from chai_eval.measure.serialise import from_json
from chai_eval.measure.statistics import Quantiles, Ratio

T = TypeVar("T")
MIB = 1 << 20
# What a line shows by its columns, None where there is nothing.
Cells = dict[str, str | None]


def tables(record: Mapping[str, Any]) -> str:
    """The whole measurement as Markdown, from its record."""
    found: Measured = from_json(Measured, record)
    parts = [_facts(found)]
    lines = [(point, name, figures) for point in found.points for name, figures in point.results.items()]
    for shown, cells in (
        (any(figures.ttft for *_, figures in lines), _first_token),
        (any(figures.tpot for *_, figures in lines), _each_token),
        (any(figures.memory for *_, figures in lines), _memory),
    ):
        if shown:
            parts.append(table([_line(*line, cells(line[-1])) for line in lines]).rstrip("\n"))
    said = [*found.notes, *(_missed(*line) for line in lines if line[-1].out_of_memory is not None)]
    return "\n\n".join([*parts, *(["\n".join(said)] if said else [])]) + "\n"


def _mib(value: float | None) -> str | None:
    return None if value is None else f"{value / MIB:.1f}"


def _facts(found: Measured) -> str:
    model, ceiling = found.model, found.ceiling
    weights = ", random weights" if model.weights == "random" else ""
    kept = f", {model.layers_kept}" if model.layers_kept else ""
    speed = f"{ceiling.bytes_per_second / 1e9:.1f} GB/s, {ceiling.flops_per_second / 1e12:.3g} TFLOP/s"
    lines = {
        "model": f"{model.name}{weights}{kept}, {model.dtype} on {model.device}",
        "weights": f"{model.weight_bytes / MIB:.0f} MiB",
        "ceiling": f"{speed} (measured)",
        "clock": f"{found.clock}, {found.threads} threads",
    }
    return "\n".join(f"{name:<8} {text}" for name, text in lines.items())


def _line(point: PointFigures, name: str, figures: Figures, cells: Cells) -> dict[str, str]:
    nothing = "–" if figures.out_of_memory is None else "no memory"
    where = {"contender": name, "length": str(point.length), "batch": str(point.batch), "new": str(point.new_tokens)}
    return where | {column: shown or nothing for column, shown in cells.items()}


def _missed(point: PointFigures, name: str, figures: Figures) -> str:
    trouble = figures.out_of_memory
    assert trouble is not None
    asked, free = (_mib(each) or "unknown" for each in (trouble.asked_bytes, trouble.free_bytes))
    tried = "not tried" if trouble.foreseen else "tried"
    return (
        f"{name}, length {point.length}, batch {point.batch}, {point.new_tokens} new tokens: out of memory "
        f"({asked} MiB asked for, {free} MiB free, {tried})"
    )


def _first_token(figures: Figures) -> Cells:
    times = _milliseconds(figures.ttft, {"TTFT ms": "median", "p10": "p10", "p90": "p90"})
    return times | {"clustering": _share(figures.clustering_share)} | _compared(figures, "ttft")


def _each_token(figures: Figures) -> Cells:
    times = _milliseconds(figures.tpot, {"TPOT ms": "median", "p10": "p10", "p90": "p90", "p99": "p99"})
    rate = figures.tokens_per_second
    return times | {"tokens/s": None if rate is None else f"{rate:.1f}"} | _compared(figures, "tpot")


def _compared(figures: Figures, figure: str) -> Cells:
    """Ratios (above 1 is faster), the most that counted work allows, how near to it, and to the machine's ceiling."""
    beside, limit = figures.times_as_fast_as, figures.limit.get(figure)
    return {
        "× sdpa": _of(beside.get(BASELINE, {}).get(figure), Ratio.text),
        "× eager": _of(beside.get(RIVAL_NAMES["eager"], {}).get(figure), Ratio.text),
        "limit ×": _of(limit, lambda each: f"{each.times_as_fast_as_mha:.2f}"),
        "of limit": _of(limit, lambda each: _share(each.share_of_times)),
        "of ceiling": _of(limit, lambda each: _share(each.share_reached)),
    }


def _memory(figures: Figures) -> Cells:
    taken = figures.memory
    first = None if taken is None else taken.prefill.cache
    last = None if taken is None or taken.decode is None else taken.decode.cache
    prefill, decode = (None, None) if taken is None else (taken.peaks.prefill, taken.peaks.decode)
    return {
        "cache": _of(first, lambda cache: cache.kind),
        "allocated MiB": _of(first, lambda cache: _mib(cache.allocated_bytes)),
        "formula MiB": _of(first, lambda cache: _mib(cache.formula_bytes)),
        "saved": _of(first, lambda cache: _share(cache.saved)),
        "at the end MiB": _of(last, lambda cache: _mib(cache.allocated_bytes)),
        "projections MiB": _of(last, lambda cache: _mib(cache.projection_bytes)),
        "peak prefill MiB": _of(prefill, lambda phase: _mib(phase.peak_above_before_bytes)),
        "held after it MiB": _of(prefill, lambda phase: _mib(phase.settled_above_before_bytes)),
        "peak decode MiB": _of(decode, lambda phase: _mib(phase.peak_above_before_bytes)),
    }


def _of(found: T | None, shown: Callable[[T], str | None]) -> str | None:
    return None if found is None else shown(found)


def _milliseconds(found: Quantiles | None, names: Mapping[str, str]) -> Cells:
    return {title: None if found is None else f"{1e3 * getattr(found, name):.2f}" for title, name in names.items()}


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"
