"""A tokenizer of single characters, for models of `tests.attention.tiny`."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.attention.tiny import VOCABULARY


def tokenizer() -> PreTrainedTokenizerFast:
    letters = [
        "<pad>",
        "<eos>",
        "<unk>",
        *string.ascii_letters,
        *string.digits,
        " ",
        "\n",
        ".",
        ",",
        ":",
        "?",
        "'",
        "-",
    ]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    assert len(vocabulary) <= VOCABULARY
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
