"""Memory and latency against the length of the text (the paper's Figures 11 and 12), from measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from chai_eval.experiments.figures import Curve, legend, lines, panels
from chai_eval.experiments.outcome import Outcome, named
from chai_eval.experiments.plan import Plan
from chai_eval.experiments.seen import interval_text
from chai_eval.markdown import table
from chai_eval.measure.contenders import BASELINE
from chai_eval.measure.figures import Figures, Measured
from chai_eval.measure.serialise import from_json
from chai_eval.measure.statistics import Quantiles, Ratio
from chai_eval.measure.stored import measured
from chai_eval.methods import build_method
from chai_eval.report.paper import LEGEND, headline, incomparable, verdict
from chai_eval.session import Session
from chai_eval.store.folder import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 1 << 20
# On which the paper measured LLaMA-7B.
THEIR_GPU = "V100"


def kv_memory(plan: Plan, session: Session) -> Outcome:
    """Bytes of the K,V cache over the length of the prompt; raises as `measure` does."""
    outcome, found = _measured(plan, session)
    frame = pd.DataFrame(list(_memory_rows(found)))
    body = [_memory_table(plan, frame), _memory_beside(plan, frame)]
    return replace(
        outcome,
        data={"data": frame},
        body="\n\n".join(body),
        figures={plan.experiment.name: partial(_memory_figure, frame, plan)},
    )


def latency(plan: Plan, session: Session) -> Outcome:
    """Time to first token and per token over the length of the prompt; raises as `measure` does."""
    outcome, found = _measured(plan, session)
    frame = pd.DataFrame(list(_latency_rows(found)))
    gpus = outcome.model["gpus"]
    body = [f"{found.clock}, {found.threads} threads.", _latency_table(plan, frame), _latency_beside(plan, frame, gpus)]
    return replace(
        outcome,
        data={"data": frame},
        body="\n\n".join(body),
        figures={plan.experiment.name: partial(_latency_figure, frame, plan)},
    )


def _measured(plan: Plan, session: Session) -> tuple[Outcome, Measured]:
    """Measure, and say what was measured."""
    check_writable(plan.results_dir)
    for settings in plan.runs.values():
        build_method(settings.method.name, **settings.method.options)
    loaded = session.model(plan.scoring.model)
    made = measured(list(plan.runs.values()), loaded, list(plan.runs))
    found: Measured = from_json(Measured, made.record)
    described = {
        "name": plan.model, "fingerprint": loaded.fingerprint, "dtype": loaded.dtype, "device": loaded.device,
        "gpus": made.record["machine"]["gpus"],
    }  # fmt: skip
    return Outcome(described, {}, "", sources={"measure": named(made.path, plan.results_dir)}), found


def _each(found: Measured) -> Iterator[tuple[dict[str, Any], Figures]]:
    for point in found.points:
        for name, figures in point.results.items():
            where = {"contender": name, "tokens": point.length, "batch": point.batch, "new_tokens": point.new_tokens}
            yield where, figures


def _memory_rows(found: Measured) -> Iterator[dict[str, Any]]:
    for where, figures in _each(found):
        taken = figures.memory
        if taken is None:
            continue
        cache, peak = taken.prefill.cache, taken.peaks.prefill
        yield {
            **where, "cache": cache.kind, "allocated_bytes": cache.allocated_bytes,
            "formula_bytes": cache.formula_bytes, "full_bytes": cache.full_bytes,
            "projection_bytes": cache.projection_bytes, "saved": cache.saved,
            "formula_saved": 1 - cache.formula_bytes / cache.full_bytes,
            "peak_above_before_bytes": peak.peak_above_before_bytes,
        }  # fmt: skip


def _memory_table(plan: Plan, frame: pd.DataFrame) -> str:
    def mib(value: float) -> str:
        return "–" if value is None or math.isnan(value) else f"{value / MIB:.2f}"

    shown = [
        {
            "contender (quick)" if plan.quick else "contender": each["contender"],
            "tokens": str(each["tokens"]),
            "K,V allocated (MiB)": mib(each["allocated_bytes"]),
            "by the formula (MiB)": mib(each["formula_bytes"]),
            "every head's (MiB)": mib(each["full_bytes"]),
            "saved (%)": f"{100 * each['saved']:.1f}",
            "most above what was held before (MiB)": mib(each["peak_above_before_bytes"]),
        }
        for each in frame.to_dict("records")
    ]
    return (
        f"After the prompt, {frame['batch'].iloc[0]} at once.\n\n{table(shown).rstrip()}\n\n"
        "Bytes are counted, not sampled: they have no interval. The formula is L (H + G) d_h numbers a layer."
    )


def _memory_beside(plan: Plan, frame: pd.DataFrame) -> str:
    model, longest = plan.experiment.paper_model, frame[frame["tokens"] == frame["tokens"].max()]
    clustered, gigabytes = longest[longest["cache"] == "clustered"], longest["full_bytes"].max() / 1e9
    saved = 100 * (clustered if len(clustered) else longest)["formula_saved"].max()
    tokens = int(longest["tokens"].iloc[0])
    rows = [
        (f"K,V cache saved at {tokens} tokens, %", (saved,) * 3, headline("kv_cache_saving_max", model), "points"),
        (f"K,V cache of MHA at {tokens} tokens, GB", (gigabytes,) * 3, headline("kv_cache_size", model), "GB"),
    ]
    return _beside(plan, rows, incomparable(plan.scoring.model, model, trained=False))


def _latency_rows(found: Measured) -> Iterator[dict[str, Any]]:
    for where, figures in _each(found):
        if figures.ttft is None:
            continue
        beside = figures.times_as_fast_as.get(BASELINE, {})
        yield {
            **where, **_quantiles("ttft", figures.ttft), **_quantiles("tpot", figures.tpot),
            **_ratio("ttft", beside.get("ttft")), **_ratio("tpot", beside.get("tpot")),
            "clustering_share": figures.clustering_share,
        }  # fmt: skip


def _quantiles(name: str, found: Quantiles | None) -> dict[str, float]:
    """Seconds: median, and the first and last tenth."""
    if found is None:
        return {}
    return {f"{name}_seconds": found.median, f"{name}_p10": found.p10, f"{name}_p90": found.p90}


def _ratio(name: str, found: Ratio | None) -> dict[str, float | None]:
    """How many times as fast as the model's own attention."""
    if found is None:
        return {}
    return {f"{name}_times": found.value, f"{name}_times_low": found.low, f"{name}_times_high": found.high}


def _latency_table(plan: Plan, frame: pd.DataFrame) -> str:
    shown = []
    for each in frame.to_dict("records"):
        line = {"contender (quick)" if plan.quick else "contender": each["contender"], "tokens": str(each["tokens"])}
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
            if f"{name}_seconds" in frame:
                low, high = (1e3 * each[f"{name}_{end}"] for end in ("p10", "p90"))
                line[f"{title} (ms), median (10 to 90 %)"] = (
                    f"{1e3 * each[f'{name}_seconds']:.2f} ({low:.2f} to {high:.2f})"
                )
            if f"{name}_times" in frame:
                ends = (each[f"{name}_times{end}"] for end in ("", "_low", "_high"))
                line[f"{title}, times as fast as {BASELINE}"] = interval_text(map(_nan, ends))
        shown.append(line)
    return (
        f"{table(shown).rstrip()}\n\nTTFT with clustering, TPOT of the tokens after the first; 95 % intervals over "
        "repetitions in parentheses behind ratios."
    )


def _latency_beside(plan: Plan, frame: pd.DataFrame, gpus: list[str]) -> str:
    model, longest = plan.experiment.paper_model, frame[frame["tokens"] == frame["tokens"].max()]
    why = incomparable(plan.scoring.model, model, trained=False)
    if why is None and not any(THEIR_GPU in each for each in gpus):
        why = f"not comparable: the paper measured on a {THEIR_GPU}"
    rows = []
    for each in longest[longest["contender"].isin([*plan.runs])].to_dict("records"):
        for name, title, quantity in (
            ("ttft", "TTFT", "ttft_speedup_max"),
            ("tpot", "next token", "next_token_speedup"),
        ):
            if f"{name}_times" in frame:
                value, low, high = (_nan(each[f"{name}_times{end}"]) for end in ("", "_low", "_high"))
                what = f"{title} at {each['tokens']} tokens, {each['contender']}, times as fast"
                rows.append((what, (value, low, high), headline(quantity, model), "times"))
    return _beside(plan, rows, why)


Beside = tuple[str, tuple[float, float, float], float | None, str]


def _beside(plan: Plan, rows: list[Beside], why: str | None) -> str:
    """Headline figures of the paper beside ours; `why` is the reason where they can't be compared."""
    shown = [
        {
            "what": what,
            "ours": interval_text((ours[0], *((math.nan, math.nan) if ours[1] == ours[2] else ours[1:]))),
            f"paper, {plan.experiment.paper_model}": "–" if paper is None else f"{paper:g}",
            "verdict": why or verdict(ours, paper, unit),
        }
        for what, ours, paper, unit in rows
    ]
    if not shown:
        return f"Beside the paper: {why or 'not comparable: nothing to compare'}."
    return f"Beside the paper:\n\n{table(shown).rstrip()}" + ("" if why else f"\n\n{LEGEND}")


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _memory_figure(frame: pd.DataFrame, plan: Plan) -> Figure:
    figure, (axes,) = panels(f"{plan.title}, {plan.model}", 1, size=(6.4, 3.8))
    own = frame.assign(mib=frame["allocated_bytes"] / MIB)
    lines(axes, own, Curve("tokens", "mib", "mib", "mib", "contender"), "K,V cache after the prompt, MiB")
    for name, each in frame.groupby("contender", sort=False):
        if (each["cache"] == "clustered").any():
            axes.plot(each["tokens"], each["formula_bytes"] / MIB, ":", color="0.3", label=f"{name}, by the formula")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylim(bottom=0)
    legend(axes, "bytes are counted")
    return figure


def _latency_figure(frame: pd.DataFrame, plan: Plan) -> Figure:
    figure, both = panels(f"{plan.title}, {plan.model}", 2)
    names = list(dict.fromkeys(frame["contender"]))
    for axes, name, title in zip(
        both, ("ttft", "tpot"), ("time to first token", "time per token after it"), strict=True
    ):
        if f"{name}_seconds" in frame:
            own = frame.assign(**{each: 1e3 * frame[f"{name}_{each}"] for each in ("seconds", "p10", "p90")})
            lines(
                axes,
                own.dropna(subset="seconds"),
                Curve("tokens", "seconds", "p10", "p90", "contender"),
                f"{title}, ms",
                names=names,
            )
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylim(bottom=0)
    legend(both[-1], "bars: 10 to 90 % of times")
    return figure
