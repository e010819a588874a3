"""What lm-eval asks of a tokenizer, and a tokenizer of a model, looked at before anything is scored."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.errors import SettingError
from chai_eval.models.embeddings import all_embedded, check_embedded, pad_embedded
from chai_eval.scoring.prepare import PreparedTask
from chai_eval.scoring.task_fidelity import request_tokens

GENERATES = "generate_until"


def check_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Iterable[PreparedTask]) -> None:
    """Refuse tasks whose requests can't be made into tokens, or into tokens that the model has embeddings for.

    Tasks are looked at only where the tokenizer leaves a doubt.

    Raises
    ------
    SettingError
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
