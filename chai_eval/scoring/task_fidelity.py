"""How close a method stays to plain attention on the documents of a task, over the very tokens that lm-eval scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.methods.base import Method
from chai_eval.scoring.compare import compare
from chai_eval.scoring.fidelity import Fidelity, summary
from chai_eval.scoring.pack import Tokens
from chai_eval.scoring.prepare import PreparedTask
from chai_eval.scoring.runner import Runner


def task_fidelity(runner: Runner, method: Method, prepared: PreparedTask, documents: int) -> Fidelity | None:
    """Compare a method with plain attention on the first documents of a task, each by its first request.

    Parameters
    ----------
    documents : int
        How many of them, at most.

    Returns
    -------
    Fidelity or None
        The same in all processes; `samples` begins with a column `doc_id`. None where no document has two tokens or
        more: nothing is predicted.

    Raises
    ------
    RunError
        For logits that are not finite.
    """
    first = first_requests(prepared)[:documents]
    read = request_tokens(runner.model, runner.tokenizer, first)
    tokens = {request.doc_id: each for request, each in zip(first, read, strict=True) if len(each) > 1}
    if not tokens:
        return None
    with runner.bar(f"{prepared.task_name} under {method.name}, against mha", len(tokens)) as bar:
        found = compare(runner, {method.name: method}, list(tokens.values()), after=bar.update)
    samples = pd.DataFrame(found[method.name])
    samples.insert(0, "doc_id", list(tokens))
    return summary(samples)


def first_requests(prepared: PreparedTask) -> list[Instance]:
    """The first request of every document, in the order of documents."""
    ordered = sorted(prepared.task.instances, key=lambda each: (each.doc_id, each.idx))
    return [next(requests) for _, requests in itertools.groupby(ordered, key=lambda each: each.doc_id)]


def request_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Instance]
) -> list[Tokens]:
    """Tokens of requests of one kind as lm-eval makes them, cut from the left to the model's positions.

    Those of a context with its continuation, of a text with the token that lm-eval begins it with, of a prompt. The
    last one is only predicted, so they may be one more than the positions.
    """
    reader = _Reader(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, truncation=True)
    kind = requests[0].request_type
    if kind == "loglikelihood":
        reader.loglikelihood(list(requests), disable_tqdm=True)
        read = reader.read
    else:
        begin = [reader.prefix_token_id] if kind == "loglikelihood_rolling" else []
        read = [(*begin, *reader.tok_encode(request.args[0])) for request in requests]
    return [each[-(reader.max_length + 1) :] for each in read]


class _Reader(HFLM):
    """lm-eval's view of a model that is never run: it notes the tokens that it would have scored."""

    read: list[Tokens]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        self.read = [(*context, *continuation) for _, context, continuation in requests]
        return [(0.0, False)] * len(requests)
