"""Tables of a measurement: latency, memory, and what the machine allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chai_eval.markdown import markdown
from chai_eval.measure.contenders import BASELINE

MIB = 1 << 20


def tables(record: Mapping[str, Any]) -> str:
    """The whole measurement as Markdown."""
    parts = [_facts(record)]
    results = [each for point in record["points"] for each in point["results"].values()]
    if any("ttft" in each for each in results):
        parts.append("\n".join(_table(record, FIRST_TOKEN)))
    if any("tpot" in each for each in results):
        parts.append("\n".join(_table(record, EACH_TOKEN)))
    if any("memory" in each for each in results):
        parts.append("\n".join(_table(record, MEMORY)))
    missed = [_missed(point, name, each) for point in record["points"] for name, each in point["results"].items()]
    said = [line for line in (*record["notes"], *missed) if line]
    return "\n\n".join([*parts, *(["\n".join(said)] if said else [])]) + "\n"


def _facts(record: Mapping[str, Any]) -> str:
    model, ceiling = record["model"], record["ceiling"]
    weights = ", random weights" if model["weights"] == "random" else ""
    kept = f", {model['layers_kept']}" if "layers_kept" in model else ""
    lines = (
        ("model", f"{model['name']}{weights}{kept}, {model['dtype']} on {model['device']}"),
        ("weights", f"{model['weight_bytes'] / MIB:.0f} MiB"),
        (
            "ceiling",
            f"{max(ceiling['copy_bytes_per_second'], ceiling['read_bytes_per_second']) / 1e9:.1f} GB/s, "
            f"{ceiling['flops_per_second'] / 1e12:.3g} TFLOP/s (measured)",
        ),
        ("clock", f"{record['clock']}, {record['threads']} threads"),
    )
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def _table(record: Mapping[str, Any], columns: Mapping[str, Callable[[Mapping[str, Any]], str]]) -> list[str]:
    head = ["contender", "length", "batch", "new", *columns]
    lines = []
    for point in record["points"]:
        where = [str(point[name]) for name in ("length", "batch", "new_tokens")]
        for name, result in point["results"].items():
            lines.append([name, *where, *(cell(result) for cell in columns.values())])
    return markdown(head, lines, left=1)


def _missed(point: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> str:
    trouble = result.get("out_of_memory")
    if trouble is None:
        return ""
    asked, free = (_mib(trouble[each]) for each in ("asked_bytes", "free_bytes"))
    tried = "not tried" if trouble["foreseen"] else "tried"
    return (
        f"{name}, length {point['length']}, batch {point['batch']}, {point['new_tokens']} new tokens: out of memory "
        f"({asked} MiB asked for, {free} MiB free, {tried})"
    )


def _reach(*path: str) -> Callable[[Mapping[str, Any]], Any]:
    def reach(result: Any) -> Any:
        for name in path:
            if result is None or name not in result:
                return None
            result = result[name]
        return result

    return reach


def _shown(form: Callable[[Any], str], *path: str) -> Callable[[Mapping[str, Any]], str]:
    find = _reach(*path)

    def cell(result: Mapping[str, Any]) -> str:
        value = find(result)
        if value is None:
            return "–" if "out_of_memory" not in result else "no memory"
        return form(value)

    return cell


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:.2f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _times(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    interval = "" if value["low"] is None else f" ({value['low']:.2f} to {value['high']:.2f})"
    return f"{value['value']:.2f}{interval}"


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value / MIB:.1f}"


def _saved(cache: Mapping[str, Any]) -> str:
    return _share(1 - cache["allocated_bytes"] / cache["full_bytes"])


def _fresh(name: str, phase: str) -> Callable[[Mapping[str, Any]], str]:
    on_device, in_process = _shown(_mib, "memory", phase, name), _shown(_mib, "memory", "fresh_process", phase, name)

    def cell(result: Mapping[str, Any]) -> str:
        return (in_process if _reach("memory", "fresh_process")(result) is not None else on_device)(result)

    return cell


def _compared(figure: str) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Ratios (above 1 is faster), the most that counted work allows, how near to it, and to the machine's ceiling."""
    return {
        "× sdpa": _shown(_times, "times_as_fast_as", BASELINE, figure),
        "× eager": _shown(_times, "times_as_fast_as", "mha (eager)", figure),
        "limit ×": _shown(_times, "limit", figure, "times_as_fast_as_mha"),
        "of limit": _shown(_share, "limit", figure, "share_of_times"),
        "of ceiling": _shown(_share, "limit", figure, "share_reached"),
    }


FIRST_TOKEN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "TTFT ms": _shown(_milliseconds, "ttft", "median"),
    "p10": _shown(_milliseconds, "ttft", "p10"),
    "p90": _shown(_milliseconds, "ttft", "p90"),
    "clustering": _shown(_share, "clustering_share"),
    **_compared("ttft"),
}

EACH_TOKEN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "TPOT ms": _shown(_milliseconds, "tpot", "median"),
    "p10": _shown(_milliseconds, "tpot", "p10"),
    "p90": _shown(_milliseconds, "tpot", "p90"),
    "p99": _shown(_milliseconds, "tpot", "p99"),
    "tokens/s": _shown(lambda value: f"{value:.1f}", "tokens_per_second"),
    **_compared("tpot"),
}

MEMORY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "cache": _shown(str, "memory", "prefill", "cache", "kind"),
    "allocated MiB": _shown(_mib, "memory", "prefill", "cache", "allocated_bytes"),
    "formula MiB": _shown(_mib, "memory", "prefill", "cache", "formula_bytes"),
    "saved": _shown(_saved, "memory", "prefill", "cache"),
    "at the end MiB": _shown(_mib, "memory", "decode", "cache", "allocated_bytes"),
    "projections MiB": _shown(_mib, "memory", "decode", "cache", "projection_bytes"),
    "peak prefill MiB": _fresh("peak_above_before_bytes", "prefill"),
    "held after it MiB": _fresh("settled_above_before_bytes", "prefill"),
    "peak decode MiB": _fresh("peak_above_before_bytes", "decode"),
}
