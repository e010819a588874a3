"""How much the model's predictions change when a single layer is clustered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.inject import attention_shape
from chai_eval.calibration.folder import write_text
from chai_eval.calibration.progress import progress
from chai_eval.methods import build_method


def counts_to_measure(heads: int, how_many: int) -> list[int]:
    """Cluster counts spread evenly below the number of heads, as far as there are any: 3 and 6 of 9 heads for two."""
    spread = {round(heads * step / (how_many + 1)) for step in range(1, how_many + 1)}
    return sorted(min(max(count, 1), heads - 1) for count in spread) if heads > 1 else []


def layer_divergence(
    model: PreTrainedModel, samples: Sequence[Tensor], counts: Sequence[int], probe_tokens: int, kept: Path
) -> Tensor:
    """KL divergence of next-token distributions from plain attention when CHAI clusters one layer alone.

    Parameters
    ----------
    samples : sequence of Tensor [tokens], int64
    counts : sequence of int
        Cluster counts to try in each layer.
    kept : Path
        Folder for what is known of each sample, from which an interrupted measurement goes on.

    Returns
    -------
    Tensor [layers, counts], float64
        Mean over tokens, in nats.
    """
    shape = attention_shape(model)

    def only(layer: int, count: int) -> Callable[[], AbstractContextManager[object]]:
        clusters = [count if at == layer else shape.heads for at in range(shape.layers)]
        return lambda: build_method("chai", clusters=clusters, probe_tokens=probe_tokens).applied(model)

    tried = [only(layer, count) for layer in range(shape.layers) for count in counts]
    sums = []
    with progress(len(samples) * len(tried), "sensitivity", "passes") as advance:
        for number, sample in enumerate(samples):
            file = kept / f"sensitivity-{number}.json"
            if not file.is_file():
                write_text(file, json.dumps(divergences(model, sample, tried, advance)))
            else:
                advance(len(tried))
            sums.append(json.loads(file.read_text(encoding="utf-8")))
    total = torch.tensor(sums, dtype=torch.float64).sum(0) / sum(map(len, samples))
    return total.view(shape.layers, len(counts))


@torch.no_grad()
def divergences(
    model: PreTrainedModel,
    sample: Tensor,
    contexts: Sequence[Callable[[], AbstractContextManager[object]]],
    done: Callable[[int], object],
) -> list[float]:
    """KL divergence, summed over a sample's tokens, from the model as it is to the model within each context.

    Two sets of the sample's logits are held at a time.
    """
    ids = sample[None].to(model.device)
    stock = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    likely = stock.exp()
    found = []
    for context in contexts:
        with context():
            other = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        found.append((likely * (stock - other)).sum(-1).double().sum().item())
        done(1)
    return found
