"""Scoring the paper's five tasks: our MHA against stock lm-eval's `HFLM`, and CHAI against our MHA."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from chai_eval import build_method, load_model
from chai_eval.benchmark.common import Row, finish, numbers, parser
from chai_eval.markdown import markdown
from chai_eval.measure.statistics import quantiles, ratio
from chai_eval.measure.turns import turns
from chai_eval.methods import Method
from chai_eval.models import model_settings
from chai_eval.scoring.evaluate import PreparedTask, default_batch_tokens, prepare
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.pack import ScoringRequest, documents
from chai_eval.scoring.tasks import load_task

DOCUMENTS = {"hellaswag": 200, "arc_easy": 300, "arc_challenge": 300, "piqa": 300, "boolq": 200}
REACH_MHA, REACH_CHAI = 2.0, 0.9

# Log-likelihood and whether it is what greedy decoding gives, request by request.
Answers = list[tuple[float, bool]]


@dataclass(frozen=True)
class Run:
    """One contender's scoring of one task."""

    seconds: float
    answers: Answers


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Score every task in turn under all contenders, print the tables, write the record."""
    options = parser(__doc__, repetitions=3)
    options.add_argument("--model", default="smollm2_mha")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--tasks", default=",".join(DOCUMENTS))
    options.add_argument("--documents", type=int, default=None, help="of each task, in place of the usual numbers")
    options.add_argument("--batch-sizes", type=numbers, default=[8, 16, 32], help="of stock lm-eval; the best counts")
    arguments = options.parse_args(given)
    model, tokenizer = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype)
    chai = build_method("chai", clusters=model_settings(arguments.model).clusters)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = {}
    for name in arguments.tasks.split(","):
        prepared = prepare(load_task(name), limit=arguments.documents or DOCUMENTS[name], seed=1234)
        found[name] = task(model, tokenizer, chai, prepared, arguments.batch_sizes, arguments.repetitions)
    rows = _rows(found, arguments)
    print(_table(found))
    return finish("scoring", rows, arguments, tasks={name: _record(each) for name, each in found.items()})


def task(
    model: Any, tokenizer: Any, chai: Method, prepared: PreparedTask, batch_sizes: Sequence[int], repetitions: int
) -> dict[str, Any]:
    """Score one task under all contenders, stock lm-eval at the batch size that a trial on some of it finds fastest."""
    instances, mha = prepared.task.instances, build_method("mha")
    some = instances[: max(len(instances) // 8, 64)]
    run(stock_lm(model, tokenizer, batch_sizes[0]), instances[:8])  # warm-up
    trials = {size: run(stock_lm(model, tokenizer, size), some).seconds for size in batch_sizes}
    best = min(trials, key=lambda size: trials[size])
    runs = in_turn(
        {
            "stock": lambda: run(stock_lm(model, tokenizer, best), instances),
            "mha": lambda: ours(model, tokenizer, mha, instances),
            "chai": lambda: ours(model, tokenizer, chai, instances),
        },
        repetitions,
    )
    return {
        "prepared": prepared,
        "best": best,
        "trials": trials,
        "runs": runs,
        "tokens": tokens(model, tokenizer, mha, instances),
    }


def in_turn(contenders: dict[str, Callable[[], Run]], repetitions: int) -> dict[str, list[Run]]:
    """Runs of each contender by repetition, each having its turn in every one."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name in turns(list(contenders), repetition):
            runs[name].append(contenders[name]())
    return runs


def stock_lm(model: Any, tokenizer: Any, batch_size: int) -> HFLM:
    """lm-eval's own, nothing changed."""
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, truncation=True)


def ours(model: Any, tokenizer: Any, method: Method, instances: list[Instance]) -> Run:
    """Score under a method; what was scored before is not remembered."""
    with method.applied(model):
        lm = PackedLM(
            model, tokenizer, method, batch_tokens=default_batch_tokens(model), description=method.name, progress=False
        )
        return run(lm, instances)


def run(lm: HFLM, instances: list[Instance]) -> Run:
    """Time the call that scores, tokenisation included."""
    start = time.perf_counter()
    answers = lm.loglikelihood(instances, disable_tqdm=True)
    return Run(time.perf_counter() - start, [(float(value), bool(greedy)) for value, greedy in answers])


class Counting(PackedLM):
    """Counts tokens in place of scoring them."""

    counted: dict[str, int]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
        asked = [
            ScoringRequest(tuple(context), tuple(continuation)).truncated(self.max_length)
            for _, context, continuation in requests
        ]
        once = sum(each.tokens for each in documents(asked, self.method.shared_context))
        self.counted = {"request_by_request": sum(len(each.fed) for each in asked), "once": once}
        return [(0.0, False)] * len(requests)


def tokens(model: Any, tokenizer: Any, method: Method, instances: list[Instance]) -> dict[str, int]:
    """Tokens of all requests, without padding, and of what they have in common but once."""
    lm = Counting(model, tokenizer, method, batch_tokens=1, progress=False)
    lm.loglikelihood(instances, disable_tqdm=True)
    return lm.counted


def predictions(prepared: PreparedTask, answers: Answers) -> list[tuple[int, int]]:
    """For each document the choice of highest log-likelihood, and of highest per character."""
    by_document: dict[int, list[tuple[int, float]]] = {}
    for instance, (value, _) in zip(prepared.task.instances, answers, strict=True):
        by_document.setdefault(instance.doc_id, []).append((instance.idx, value))
    chosen = []
    docs = {instance.doc_id: instance.doc for instance in prepared.task.instances}
    for doc_id, scored in sorted(by_document.items()):
        values = np.array([value for _, value in sorted(scored)])
        lengths = np.array([len(choice) for choice in prepared.task.doc_to_choice(docs[doc_id])], dtype=float)
        chosen.append((int(values.argmax()), int((values / lengths).argmax())))
    return chosen


def agreement(prepared: PreparedTask, one: Answers, other: Answers) -> dict[str, float]:
    """Largest difference of a log-likelihood, and how many predictions differ."""
    first, second = predictions(prepared, one), predictions(prepared, other)
    return {
        "max_difference": max(abs(a - b) for (a, _), (b, _) in zip(one, other, strict=True)),
        "predictions": 2 * len(first),
        "predictions_that_differ": sum(
            x != y for mine, theirs in zip(first, second, strict=True) for x, y in zip(mine, theirs, strict=True)
        ),
        "greedy_that_differ": sum(a != b for (_, a), (_, b) in zip(one, other, strict=True)),
    }


def _rows(found: dict[str, dict[str, Any]], arguments: Any) -> list[Row]:
    def suite(contender: str) -> list[float]:
        by_task = [[each.seconds for each in task["runs"][contender]] for task in found.values()]
        return [sum(times) for times in zip(*by_task, strict=True)]

    equal = [_agreement(each) for each in found.values()]
    off = max(each["max_difference"] for each in equal)
    differ = sum(each["predictions_that_differ"] for each in equal)
    n = sum(each["prepared"].n_documents for each in found.values())
    setting = f"{arguments.model}, {len(found)} tasks, {n} documents"
    by_request, once = (sum(each["tokens"][name] for each in found.values()) for name in ("request_by_request", "once"))
    return [
        Row(
            "scoring under MHA",
            f"{setting}; max Δ {off:.1e}, {differ} predictions differ",
            "stock HFLM at its best batch size",
            ratio(suite("stock"), suite("mha")),
            REACH_MHA,
            by_request / once,
        ),
        Row("scoring under CHAI", setting, "our MHA", ratio(suite("mha"), suite("chai")), REACH_CHAI, 1.0),
    ]


def _agreement(task: dict[str, Any]) -> dict[str, float]:
    runs = task["runs"]
    return agreement(task["prepared"], runs["stock"][0].answers, runs["mha"][0].answers)


def _table(found: dict[str, dict[str, Any]]) -> str:
    columns = [
        "task",
        "documents",
        "stock batch",
        "stock doc/s",
        "MHA doc/s",
        "CHAI doc/s",
        "MHA ×",
        "CHAI ×",
        "max Δ",
        "differ",
    ]
    lines = []
    for name, each in found.items():
        prepared, runs = each["prepared"], each["runs"]
        seconds = {contender: [one.seconds for one in many] for contender, many in runs.items()}
        speed = {contender: prepared.n_documents / quantiles(times)["median"] for contender, times in seconds.items()}
        equal = _agreement(each)
        lines.append(
            [
                name,
                str(prepared.n_documents),
                str(each["best"]),
                *(f"{speed[contender]:.2f}" for contender in ("stock", "mha", "chai")),
                f"{ratio(seconds['stock'], seconds['mha']).value:.2f}",
                f"{ratio(seconds['mha'], seconds['chai']).value:.2f}",
                f"{equal['max_difference']:.1e}",
                f"{equal['predictions_that_differ']} of {equal['predictions']}",
            ]
        )
    return "\n".join(markdown(columns, lines, left=1)) + "\n"


def _record(found: dict[str, Any]) -> dict[str, Any]:
    prepared = found["prepared"]
    return {
        "documents": prepared.n_documents,
        "requests": prepared.n_requests,
        "prompts_hash": prepared.prompts_hash,
        "tokens": found["tokens"],
        "stock_batch_size": found["best"],
        "stock_trials": found["trials"],
        "seconds": {name: [each.seconds for each in many] for name, many in found["runs"].items()},
        "agreement": _agreement(found),
    }


if __name__ == "__main__":
    main()
