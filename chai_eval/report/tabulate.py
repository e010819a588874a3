"""The tables of a report, from what was read and paired."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chai_eval.report.columns import Column, Table, interval, percent, plain, signed
from chai_eval.report.facts import BASELINE, MIB, p_text
from chai_eval.report.pairs import Pair
from chai_eval.report.ranking import Ranked, Ranking, pool
from chai_eval.report.records import Records
from chai_eval.report.verdicts import claims, verdict

WHERE = (Column("model", "model", number=False), Column("method", "method", number=False))


def score_table(found: Sequence[Pair]) -> Table:
    """One line a model, method and task."""
    lines = [_score_line(each) for each in found]
    columns = [
        *WHERE,
        Column("task", "task", number=False),
        Column("metric", "metric", number=False),
        Column("n", "n"),
        Column("MHA", "mha", lambda each: _score(each, "mha")),
        Column("score", "score", lambda each: _score(each, "score")),
        Column("difference (pp)", "difference", lambda each: _points(each, "difference")),
        Column("95 % interval", "low", lambda each: _points_interval(each)),
        Column("McNemar p", "p", lambda each: p_text(each["p"])),
        Column("KL (nats)", "kl", lambda each: "∞" if each["kl"] == math.inf else plain(each["kl"])),
        Column("same token (%)", "same_token", lambda each: percent(each["same_token"])),
        Column("held (%)", "held", lambda each: percent(each["held"])),
        Column("read (%)", "read", lambda each: percent(each["read"])),
        Column("paper (pp)", "paper", lambda each: signed(each["paper"])),
        Column("verdict", "verdict", number=False),
    ]
    return Table(
        "scores",
        "Each method beside plain attention (MHA) on the same documents: difference with its paired 95 % interval, "
        "exact McNemar p; KL(MHA ‖ method) per token and how often both predict the same token; K,V bytes held and "
        "read by a decoded token, of MHA's; the paper's difference.",
        columns,
        lines,
    )


def _score_line(pair: Pair) -> dict[str, Any]:
    row, (paper, said) = pair.row, verdict(pair)
    lost = row.difference
    return {
        "model": pair.model, "method": pair.label, "task": pair.task, "metric": row.metric, "n": row.n,
        "mha": row.mha, "score": row.method, "difference": lost and lost.points, "low": lost and lost.low,
        "high": lost and lost.high, "p": lost and lost.p, "kl": row.divergence, "same_token": row.agreement,
        "held": pair.share("held"), "read": pair.share("read"), "paper": paper, "verdict": said,
        "percent": row.percent, "key": pair.result.record["key"],
    }  # fmt: skip


def _score(line: Mapping[str, Any], name: str) -> str:
    value = line[name]
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if line["percent"] else f"{value:.4g}"


def _points(line: Mapping[str, Any], name: str) -> str:
    value = line[name]
    return signed(value) if value is None or line["percent"] else f"{value / 100:+.4g} (raw)"


def _points_interval(line: Mapping[str, Any]) -> str:
    scale = 1 if line["percent"] else 0.01
    low, high = (None if line[end] is None else scale * line[end] for end in ("low", "high"))
    return interval(low, high, 2 if line["percent"] else 4)


def pooled_table(found: Sequence[Pair]) -> Table:
    """One line a model and method: the documents of all its tasks together."""
    lines = []
    for model in dict.fromkeys(each.model for each in found):
        for each in pool([one for one in found if one.model == model]):
            lost = each.difference
            held = None if each.saved is None else 1 - each.saved
            lines.append(
                {
                    "model": model, "method": each.label, "tasks": each.tasks, "n": each.documents,
                    "difference": lost.points, "low": lost.low, "high": lost.high, "p": lost.p, "held": held,
                }
            )  # fmt: skip
    columns = [
        *WHERE,
        Column("tasks", "tasks"),
        Column("n", "n"),
        Column("difference (pp)", "difference", lambda each: signed(each["difference"])),
        Column("95 % interval", "low", lambda each: interval(each["low"], each["high"])),
        Column("McNemar p", "p", lambda each: p_text(each["p"])),
        Column("held (%)", "held", lambda each: percent(each["held"])),
    ]
    said = "All documents of a method's tasks together, beside plain attention on the same documents."
    return Table("pooled", said, columns, lines)


def ranking_table(ranked: Ranking) -> Table:
    """One line a method, least lost first."""
    columns = [
        Column("#", "place"),
        Column("method", "method", number=False),
        Column("saved (%)", "saved", lambda each: percent(each["saved"])),
        Column("KL (nats)", "kl", lambda each: plain(each["kl"])),
        Column("95 % interval", "low", lambda each: interval(each["low"], each["high"], 4, sign=False)),
        Column("more than the one before", "more_low", lambda each: interval(each["more_low"], each["more_high"], 4)),
        Column("told apart", "told", lambda each: each["told"], number=False),
        Column("same token (%)", "same_token", lambda each: percent(each["same_token"])),
        Column("score (pp)", "difference", lambda each: signed(each["difference"])),
        Column(
            "95 % of the score",
            "difference_low",
            lambda each: interval(each["difference_low"], each["difference_high"]),
        ),
        Column("at saved (%)", "score_saved", lambda each: percent(each["score_saved"])),
    ]
    share = f"{100 * ranked.saving:.0f} %"
    said = (
        f"{ranked.model}: each method at the setting that loses least of those that save {share} of the K,V bytes or "
        f"more; KL on {ranked.text}; scores over all documents of its tasks, at the saving that comes next to {share}."
    )
    return Table(f"ranking-{ranked.model}", said, columns, [_ranked_line(each) for each in ranked.places])


def _ranked_line(each: Ranked) -> dict[str, Any]:
    kl, low, high = each.loss.kl
    more, scores = each.more or (None, None), each.scores
    lost = None if scores is None else scores.difference
    return {
        "place": each.place, "method": each.loss.method, "settings": each.loss.settings, "saved": each.loss.saved,
        "kl": kl, "low": low, "high": high, "more_low": more[0], "more_high": more[1],
        "told": "" if each.more is None else "yes" if each.told else "no",
        "same_token": each.loss.same_token, "difference": lost and lost.points, "difference_low": lost and lost.low,
        "difference_high": lost and lost.high, "score_saved": scores and scores.saved,
    }  # fmt: skip


def frontier_table(records: Records) -> Table:
    """One line a point of each frontier."""
    lines = []
    for each in records.frontiers:
        about = {"model": each.content["model"]["name"], "context": each.content["settings"]["tokens"]}
        lines += [{**about, **point} for point in each.content["points"]]
    columns = [
        *WHERE,
        Column("context", "context"),
        Column("held (%)", "held", lambda each: percent(each["held"])),
        Column("read (%)", "read", lambda each: percent(each["read"])),
        Column("KL (nats)", "kl", lambda each: plain(each["kl"])),
        Column("95 % interval", "kl_low", lambda each: interval(each["kl_low"], each["kl_high"], 4, sign=False)),
        Column("same token (%)", "same_token", lambda each: percent(each["same_token"])),
        Column("dominated", "dominated", lambda each: "yes" if each["dominated"] else "", number=False),
    ]
    said = "Methods over their range at equal K,V bytes; dominated: another holds and reads no more, and loses no more."
    return Table("frontier", said, columns, lines)


def measured_table(records: Records) -> Table:
    """One line a contender and point of each measurement."""
    lines = [line for each in records.measurements for line in _measured_lines(each.content)]
    lines += [
        line for each in records.benchmarks if (own := each.content.get("measured")) for line in _measured_lines(own)
    ]
    columns = [
        *WHERE,
        Column("precision", "precision", number=False),
        Column("tokens", "length"),
        Column("batch", "batch"),
        Column("TTFT (ms)", "ttft", lambda each: plain(each["ttft"], 4)),
        Column("TPOT (ms)", "tpot", lambda each: plain(each["tpot"], 4)),
        Column("TTFT × sdpa", "ttft_ratio", lambda each: plain(each["ttft_ratio"])),
        Column("TTFT 95 %", "ttft_low", lambda each: interval(each["ttft_low"], each["ttft_high"], sign=False)),
        Column("TPOT × sdpa", "tpot_ratio", lambda each: plain(each["tpot_ratio"])),
        Column("TPOT 95 %", "tpot_low", lambda each: interval(each["tpot_low"], each["tpot_high"], sign=False)),
        Column("cache (MiB)", "cache", lambda each: plain(each["cache"], 4)),
    ]
    said = (
        "Latency (medians) and memory measured side by side on one machine: times as fast as the model's own attention "
        "(sdpa), above 1 is faster; bytes allocated for the K,V cache after the prompt."
    )
    return Table("measured", said, columns, lines)


def _measured_lines(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    model, lines = measured["model"], []
    kept = f" ({model['layers_kept']})" if model.get("layers_kept") else ""
    for point in measured["points"]:
        for name, found in point["results"].items():
            ratios = (found.get("times_as_fast_as") or {}).get(BASELINE) or {}
            cache = ((found.get("memory") or {}).get("prefill") or {}).get("cache") or {}
            line = {
                "model": model["name"] + kept, "method": name, "precision": f"{model['dtype']}, {model['device']}",
                "length": point["length"], "batch": point["batch"],
                "cache": cache["allocated_bytes"] / MIB if cache else None,
            }  # fmt: skip
            for of in ("ttft", "tpot"):
                line[of] = 1e3 * found[of]["median"] if found.get(of) else None
                line |= {f"{of}_{end}": (ratios.get(of) or {}).get(key) for end, key in ENDS.items()}
            lines.append(line)
    return lines


ENDS = {"ratio": "value", "low": "low", "high": "high"}


def claim_table(found: Sequence[Pair]) -> Table:
    """One line a model and claim of the paper."""
    lines = [
        {"model": model, "claim": each.says, "paper": each.paper, "ours": each.ours, "verdict": each.verdict}
        for model in dict.fromkeys(each.model for each in found)
        for each in claims(model, found)
    ]
    columns = [
        Column("model", "model", number=False),
        Column("the paper's claim", "claim", number=False),
        Column("its figure", "paper", number=False),
        Column("ours (95 % interval)", "ours", number=False),
        Column("verdict", "verdict", number=False),
    ]
    return Table("claims", "The paper's claims held against these records.", columns, lines)
