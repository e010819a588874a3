"""Scoring the paper's five tasks: our MHA against stock lm-eval's `HFLM`, and CHAI against our MHA."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from chai_eval import build_method, load_model
from chai_eval.benchmark.records import Row, finish, numbers, parser, positive, progress
from chai_eval.markdown import table
from chai_eval.measure.clock import in_turn
from chai_eval.measure.serialise import to_json
from chai_eval.measure.statistics import quantiles, ratio
from chai_eval.methods import Method
from chai_eval.models import model_settings
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.pack import ScoringRequest, documents
from chai_eval.scoring.prepare import PreparedTask, prepare
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tasks import load_task

DOCUMENTS = {"hellaswag": 200, "arc_easy": 300, "arc_challenge": 300, "piqa": 300, "boolq": 200}

# Log-likelihood and whether it is what greedy decoding gives, request by request.
Answers = list[tuple[float, bool]]


@dataclass(frozen=True)
class Agreement:
    """Largest difference of a log-likelihood, and how many predictions, and greedy ones, differ."""

    max_difference: float
    predictions: int
    predictions_that_differ: int
    greedy_that_differ: int


@dataclass(frozen=True)
class TaskFigures:
    """What one task gave: seconds by contender (`stock`, `mha`, `chai`), and how far the first two agree.

    `tokens` are those `request_by_request`, without padding, and `once`: of what requests have in common but once.
    Stock lm-eval's batch size is the fastest of its trials (seconds by size).
    """

    documents: int
    requests: int
    prompts_hash: str
    tokens: dict[str, int]
    stock_batch_size: int
    stock_trials: dict[int, float]
    seconds: dict[str, list[float]]
    agreement: Agreement


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Score every task in turn under all contenders, print the tables, write the record."""
    options = parser("scoring", __doc__, repetitions=3)
    options.add_argument("--model", default="smollm2_mha")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--tasks", default=",".join(DOCUMENTS))
    options.add_argument("--documents", type=positive, help="of each task, in place of the usual numbers")
    options.add_argument("--batch-sizes", type=numbers, default=[8, 16, 32], help="of stock lm-eval; the best counts")
    arguments = options.parse_args(given)
    model, tokenizer = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype)
    scorer = Scorer(model, tokenizer, build_method("chai", clusters=model_settings(arguments.model).clusters))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    done, found = progress("scoring", arguments), {}
    for name in arguments.tasks.split(","):
        limit = arguments.documents or DOCUMENTS[name]
        measure = partial(scorer.task, name, limit, arguments.batch_sizes, arguments.repetitions)
        found[name] = done.part(name, TaskFigures, measure)
    print(table([_line(name, each) for name, each in found.items()]))
    return finish(done, _rows(arguments.model, found), tasks=to_json(found, dict[str, TaskFigures]))


@dataclass(frozen=True)
class Scorer:
    """A model and the method that it is scored under beside plain attention."""

    model: Any
    tokenizer: Any
    chai: Method

    def task(self, name: str, limit: int, batch_sizes: Sequence[int], repetitions: int) -> TaskFigures:
        """Score a task under all contenders, stock lm-eval at the batch size that a trial on some of it finds fastest.

        Time is that of the call that scores, tokenisation included.
        """
        prepared = prepare(load_task(name), limit=limit, seed=1234)
        instances, mha = prepared.task.instances, build_method("mha")
        some = instances[: max(len(instances) // 8, 64)]
        self.stock(batch_sizes[0], instances[:8])  # warm-up
        trials = {size: self.stock(size, some)[0] for size in batch_sizes}
        best = min(trials, key=lambda size: trials[size])
        contenders = {
            "stock": partial(self.stock, best, instances),
            "mha": partial(self.ours, mha, instances),
            "chai": partial(self.ours, self.chai, instances),
        }
        seconds: dict[str, list[float]] = {each: [] for each in contenders}
        answers: dict[str, Answers] = {}
        for turn in in_turn(contenders, repetitions):
            seconds[turn.contender].append(turn.found[0])
            answers.setdefault(turn.contender, turn.found[1])
        equal = agreement(prepared, answers["stock"], answers["mha"])
        tokens = self.tokens(mha, instances)
        counts = prepared.n_documents, prepared.n_requests, prepared.prompts_hash
        return TaskFigures(*counts, tokens, best, trials, seconds, equal)

    def stock(self, batch_size: int, instances: list[Instance]) -> tuple[float, Answers]:
        """lm-eval's own, nothing changed."""
        given = {"backend": "causal", "batch_size": batch_size, "truncation": True}
        return _timed(HFLM(pretrained=self.model, tokenizer=self.tokenizer, **given), instances)

    def ours(self, method: Method, instances: list[Instance]) -> tuple[float, Answers]:
        """Score under a method; what was scored before is not remembered."""
        runner = Runner(self.model, self.tokenizer, progress=False)
        with method.applied(self.model):
            return _timed(PackedLM(runner, method, description=method.name), instances)

    def tokens(self, method: Method, instances: list[Instance]) -> dict[str, int]:
        """Tokens of all requests, as `TaskFigures` has them."""
        lm = Counting(Runner(self.model, self.tokenizer, batch_tokens=1, progress=False), method)
        lm.loglikelihood(instances, disable_tqdm=True)
        return lm.counted


def _timed(lm: HFLM, instances: list[Instance]) -> tuple[float, Answers]:
    start = time.perf_counter()
    answers = lm.loglikelihood(instances, disable_tqdm=True)
    return time.perf_counter() - start, [(float(value), bool(greedy)) for value, greedy in answers]


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


def predictions(prepared: PreparedTask, answers: Answers) -> list[tuple[int, int]]:
    """For each document the choice of highest log-likelihood, and of highest per character."""
    pairs = zip(prepared.task.instances, answers, strict=True)
    ordered = sorted(((each, value) for each, (value, _) in pairs), key=lambda pair: (pair[0].doc_id, pair[0].idx))
    chosen = []
    for _, requests in groupby(ordered, key=lambda pair: pair[0].doc_id):
        instances, values = zip(*requests, strict=True)
        choices = prepared.task.doc_to_choice(instances[0].doc)
        per_character = np.divide(values, [len(choice) for choice in choices])
        chosen.append((int(np.argmax(values)), int(per_character.argmax())))
    return chosen


def agreement(prepared: PreparedTask, one: Answers, other: Answers) -> Agreement:
    """How far two scorings of a task agree."""
    first, second = (np.array(predictions(prepared, each)) for each in (one, other))
    off = max(abs(a - b) for (a, _), (b, _) in zip(one, other, strict=True))
    greedy = sum(a != b for (_, a), (_, b) in zip(one, other, strict=True))
    return Agreement(off, first.size, int((first != second).sum()), greedy)


def _rows(model: str, found: Mapping[str, TaskFigures]) -> list[Row]:
    def suite(contender: str) -> list[float]:
        by_task = [each.seconds[contender] for each in found.values()]
        return [sum(times) for times in zip(*by_task, strict=True)]

    off = max(each.agreement.max_difference for each in found.values())
    differ = sum(each.agreement.predictions_that_differ for each in found.values())
    setting = f"{model}, {len(found)} tasks, {sum(each.documents for each in found.values())} documents"
    by_request, once = (sum(each.tokens[name] for each in found.values()) for name in ("request_by_request", "once"))
    equal, peer = f"{setting}; max Δ {off:.1e}, {differ} predictions differ", "stock HFLM at its best batch size"
    return [
        Row("scoring under MHA", equal, peer, ratio(suite("stock"), suite("mha")), by_request / once),
        Row("scoring under CHAI", setting, "our MHA", ratio(suite("mha"), suite("chai")), 1.0),
    ]


def _line(name: str, found: TaskFigures) -> dict[str, str]:
    speed = {each: f"{found.documents / quantiles(times).median:.2f}" for each, times in found.seconds.items()}
    equal, seconds = found.agreement, found.seconds
    return {
        "task": name,
        "documents": str(found.documents),
        "stock batch": str(found.stock_batch_size),
        "stock doc/s": speed["stock"],
        "MHA doc/s": speed["mha"],
        "CHAI doc/s": speed["chai"],
        "MHA ×": f"{ratio(seconds['stock'], seconds['mha']).value:.2f}",
        "CHAI ×": f"{ratio(seconds['mha'], seconds['chai']).value:.2f}",
        "max Δ": f"{equal.max_difference:.1e}",
        "differ": f"{equal.predictions_that_differ} of {equal.predictions}",
    }
