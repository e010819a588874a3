"""Under every method a text fed token by token, with a cache, gives what the whole text gives."""

from __future__ import annotations

import pytest
import torch

from tests.attention.tiny import masked_logits, padded, requests
from tests.methods.cases import CASES
from tests.methods.test_against_loops import TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "opt"])
@pytest.mark.parametrize("case", CASES)
def test_token_by_token_equals_the_whole_text(case: str, name: str, side: str) -> None:
    model = CASES[case].model(name)
    prompts, later = requests([7, 12, 9], seed=5), requests([8, 8, 8], seed=6)
    whole = [torch.cat(both) for both in zip(prompts, later, strict=True)]
    ids, mask = padded(prompts, side)
    with CASES[case].build(model).applied(model), torch.no_grad():
        expected = masked_logits(model, *padded(whole, "left"))
        cache, found = None, []
        for step in [ids, *torch.stack(later).split([1, 1, 3, 1, 2], dim=1)]:
            mask = mask if cache is None else torch.cat([mask, torch.ones_like(step)], dim=1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            given = {"position_ids": positions} if name != "opt" else {}
            out = model(input_ids=step, attention_mask=mask, cache=cache, use_cache=True, **given)
            cache = out.cache
            found.append(out.logits)
    for row, prompt in enumerate(prompts):
        ours = torch.cat([each[row] for each in found[1:]])
        torch.testing.assert_close(ours, expected[row][len(prompt) :], atol=TOLERANCE, rtol=0)
