"""The embedded model and its twin under plain attention."""

from __future__ import annotations

import pytest
import torch

from chai_eval import build_method, load_model

pytestmark = pytest.mark.assets


def test_the_model_and_its_twin_give_the_same_logits_to_the_bit_under_mha() -> None:
    text = ["The tallest mountain in the world is", "Question: how do I open a jar?\nAnswer:"]
    logits = []
    for name in ("smollm2", "smollm2_mha"):
        model, tokenizer = load_model(name, device="cpu", dtype="float32")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        batch = tokenizer(text, return_tensors="pt", padding=True)
        with build_method("mha").applied(model), torch.no_grad():
            logits.append(model(**batch).logits)
    assert torch.equal(*logits)


def test_as_many_clusters_as_heads_is_mha_on_real_weights() -> None:
    model, tokenizer = load_model("smollm2_mha", device="cpu", dtype="float32")
    batch = tokenizer("A clustered head attends where its representative does.", return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).logits
        with build_method("chai", clusters=[[9, 30]]).applied(model):
            found = model(**batch).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
