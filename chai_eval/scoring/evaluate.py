"""Score one task under one method through lm-eval's `evaluate`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
from lm_eval import evaluate
from lm_eval.api.task import Task
from transformers import set_seed

from chai_eval.errors import RunError
from chai_eval.methods.base import Method
from chai_eval.scoring.decode import DecodedLM
from chai_eval.scoring.lm import GENERATION_BATCH, PackedLM
from chai_eval.scoring.own_tasks import sandboxed_templates
from chai_eval.scoring.prepare import PreparedTask
from chai_eval.scoring.runner import Runner
from chai_eval.store.journal import Journal

# Resamplings for the standard errors that have no formula (perplexity and the like); means have one.
BOOTSTRAP_ITERATIONS = 1000


@dataclass(frozen=True)
class Scores:
    """What a task gave.

    Samples have one row per document (and filter, where a task has several): doc_id, doc_hash, prompt_hash, for
    multiple choice the log-likelihoods of the choices (natural logarithm) and their lengths (characters), and one
    column per metric. Metrics are as lm-eval aggregates them. `batch` is how requests were batched: most tokens in a
    pass that scores, requests in one that generates.
    """

    samples: pd.DataFrame
    metrics: dict[str, dict[str, float | None]]
    batch: dict[str, int]


def score(
    runner: Runner,
    method: Method,
    prepared: PreparedTask,
    *,
    scoring: str = "packed",
    journal: Journal | None = None,
) -> Scores | None:
    """Score a task under a method, put into the model and taken out again; None in all processes but the first.

    Requests are "packed" in rows, or "decode" scores contexts at once and their continuations token by token through
    the cache. Those found in the journal are not scored again, and those scored are added. RunError for logits that are
    not finite, or a metric that is not.
    """
    task = prepared.task_name
    with method.applied(runner.model):
        lm = (DecodedLM if scoring == "decode" else PackedLM)(
            runner,
            method,
            journal=journal,
            description=f"{task} under {method.name}",
            chat_template=prepared.chat_template,
            seed=prepared.seed,
        )
        results = _evaluated(lm, prepared)
    if not runner.ranks.first:
        return None
    return Scores(
        _samples(prepared.task, results["samples"][task]),
        _metrics(task, results["results"][task]),
        {"batch_tokens": lm.batch_tokens, "generation_batch": GENERATION_BATCH},
    )


def _evaluated(lm: PackedLM, prepared: PreparedTask) -> dict[str, Any]:
    """What lm-eval makes of a task's requests, which `lm` scores.

    As its `simple_evaluate` does it, without a report of the environment, which takes seconds and is in no record.
    """
    set_seed(prepared.seed)
    prepared.task.set_fewshot_seed(prepared.seed)
    with sandboxed_templates():
        results: dict[str, Any] = evaluate(
            lm,
            {"tasks": {prepared.task_name: prepared.task}, "groups": {}, "group_map": {}},
            limit=prepared.limit,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            system_instruction=prepared.prompts.system_instruction,
            apply_chat_template=prepared.chat_template is not None,
            fewshot_as_multiturn=prepared.prompts.multiturn,
        )
    return results


def _samples(task: Task, logged: list[dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for sample in logged:
        row = {name: sample[name] for name in ("doc_id", "doc_hash", "prompt_hash")}
        if len({entry["filter"] for entry in logged}) > 1:
            row["filter"] = sample["filter"]
        if task.OUTPUT_TYPE == "multiple_choice":
            choices = task.doc_to_choice(sample["doc"])
            row["loglikelihoods"] = [float(response[0][0]) for response in sample["resps"][: len(choices)]]
            row["lengths"] = [len(choice) for choice in choices]
        elif task.OUTPUT_TYPE == "generate_until":
            row["responses"] = [str(response) for response in sample["filtered_resps"]]
        row.update({name: _number(sample[name]) for name in sample["metrics"]})
        rows.append(row)
    return pd.DataFrame(rows).sort_values("doc_id", kind="stable", ignore_index=True)


def _number(value: Any) -> float | str:
    """A metric of one document; what is no number (parts of a corpus metric) is kept as text."""
    return float(value) if isinstance(value, (int, float)) or hasattr(value, "__float__") else json.dumps(value)


def _metrics(task: str, results: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """lm-eval's `{"acc,none": …, "acc_stderr,none": …}` as `{"acc": {"value": …, "stderr": …}}`.

    RunError for a metric that is no finite number, which no record can hold.
    """
    found: dict[str, dict[str, float | None]] = {}
    for entry, value in results.items():
        metric, _, kind = entry.partition(",")
        if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        name = metric if kind == "none" else f"{metric} ({kind})"
        if not math.isfinite(value):
            reason = "it has no value for them" if math.isnan(value) else "the model rules out (logit -inf) their text"
            raise RunError(f"{task}: {name} of these documents is {value}: {reason}; allowed: a finite number")
        stderr: Any = results.get(f"{metric}_stderr,{kind}")
        known = isinstance(stderr, (int, float)) and math.isfinite(stderr)
        found[name] = {"value": float(value), "stderr": float(stderr) if known else None}
    return found
