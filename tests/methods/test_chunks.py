"""A left-padded batch that comes through the cache in chunks of any size has the logits of the whole text at once."""

from __future__ import annotations

import pytest
import torch

from tests.attention.tiny import padded, requests
from tests.methods.cases import CASES

# As the other tests through a cache: importance is summed in another order, which float32 rounds.
TOLERANCE = 1e-3
LENGTHS = [30, 2, 6, 15]


@pytest.mark.parametrize("size", [1, 4, 7, 16])
@pytest.mark.parametrize("case", CASES)
def test_chunks_of_a_left_padded_batch_equal_the_whole(case: str, size: int) -> None:
    model, (ids, mask) = CASES[case].model("llama"), padded(requests(LENGTHS), "left")
    with CASES[case].build(model).applied(model), torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        cache, parts = None, []
        for start in range(0, ids.shape[1], size):
            stop = start + size
            out = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
    chunks = torch.cat(parts, 1)
    torch.testing.assert_close(chunks[mask.bool()], whole[mask.bool()], atol=TOLERANCE, rtol=0)
