"""What lm-eval asks of a tokenizer, and a tokenizer of a model, looked at before anything is scored."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.errors import SettingError
from chai_eval.models.embeddings import all_embedded, check_embedded, pad_embedded
from chai_eval.scoring.pack import Tokens
from chai_eval.scoring.prepare import PreparedTask

GENERATES = "generate_until"


def check_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Iterable[PreparedTask]) -> None:
    """Refuse tasks whose requests can't be made into tokens, or into tokens that the model has embeddings for.

    By a SettingError; tasks are looked at only where the tokenizer leaves a doubt.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise SettingError(
            "model.tokenizer: it has neither a BOS nor an EOS token, one of which lm-eval puts before a text; "
            "allowed: a tokenizer with bos_token or eos_token, such as tokenizer_config.json names it"
        )
    if tokenizer.eos_token_id is not None and all_embedded(model, tokenizer):
        return
    for task in tasks:
        _check(model, tokenizer, task)


def _check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: PreparedTask) -> None:
    requests = sorted(task.task.instances, key=lambda each: each.request_type)
    for kind, asked in itertools.groupby(requests, key=lambda each: each.request_type):
        if kind == GENERATES and tokenizer.eos_token_id is None:
            raise SettingError(
                f"model.tokenizer: it has no EOS token, which ends a text that {task.task_name} has written; "
                "allowed: a tokenizer with eos_token, such as tokenizer_config.json names it"
            )
        tokens = itertools.chain.from_iterable(request_tokens(model, tokenizer, list(asked)))
        if kind == GENERATES:
            pad_embedded(model, tokenizer)
            tokens = itertools.chain(tokens, [tokenizer.pad_token_id])
        check_embedded(model, tokenizer, tokens)


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
