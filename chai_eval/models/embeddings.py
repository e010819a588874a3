"""Tokens that a model has no embedding for: on a GPU they end the process, so they are found before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.errors import SettingError


def embedding_count(model: PreTrainedModel) -> int:
    """Token ids from 0 up that the model has an embedding for, padding of the table included."""
    table: Any = model.get_input_embeddings()
    return int(table.weight.shape[0])


def all_embedded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the model has an embedding for every token that the tokenizer could give."""
    # What is put before a text needs no entry in the vocabulary.
    return max(0, *tokenizer.get_vocab().values(), *tokenizer("a")["input_ids"]) < embedding_count(model)


def check_embedded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> None:
    """Refuse by SettingError the first token that the model has no embedding for; those never used may have none."""
    count = embedding_count(model)
    found = next((token for token in tokens if token >= count), None)
    if found is not None:
        raise SettingError(
            f"model.tokenizer: token {tokenizer.convert_ids_to_tokens(found)!r} has the id {found}, but the model has "
            f"{count} embeddings; allowed: the model's own tokenizer, or text without that token"
        )


def pad_embedded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Pad with the EOS token where the model has no embedding for the token to pad with: padding is never attended."""
    if (tokenizer.pad_token_id or 0) >= embedding_count(model) and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token


def embedded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Iterator[Tensor], count: int | None
) -> Iterator[Tensor]:
    """The first `count` samples (None: all), each `[tokens]`; read and checked at once where any token may be wrong.

    Raises as `check_embedded` does.
    """
    first = itertools.islice(samples, count)
    if all_embedded(model, tokenizer):
        return first
    read = list(first)
    check_embedded(model, tokenizer, (token for sample in read for token in sample.tolist()))
    return iter(read)
