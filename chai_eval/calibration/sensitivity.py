"""How much the model's predictions change when a single layer is clustered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from chai_eval.methods import build_method


def counts_to_measure(heads: int, how_many: int) -> list[int]:
    """Cluster counts spread evenly below the number of heads, as far as there are any: 3 and 6 of 9 heads for two."""
    spread = {round(heads * step / (how_many + 1)) for step in range(1, how_many + 1)}
    return sorted(min(max(count, 1), heads - 1) for count in spread) if heads > 1 else []


@torch.no_grad()
def layer_divergence(
    model: PreTrainedModel, samples: Sequence[Tensor], counts: Sequence[int], layers: int, heads: int, probe_tokens: int
) -> Tensor:
    """KL divergence of next-token distributions from plain attention when CHAI clusters one layer alone.

    Parameters
    ----------
    samples : sequence of Tensor [tokens], int64
        All of one length.
    counts : sequence of int
        Cluster counts to try in each layer.

    Returns
    -------
    Tensor [layers, counts], float64
        Mean over tokens, in nats.
    """

    def only(layer: int, count: int) -> AbstractContextManager[object]:
        runs = [count if at == layer else heads for at in range(layers)]
        return build_method("chai", clusters=runs, probe_tokens=probe_tokens).applied(model)

    tried = [[lambda at=layer, k=count: only(at, k) for count in counts] for layer in range(layers)]
    return divergence_of(model, samples, tried)


@torch.no_grad()
def divergence_of(
    model: PreTrainedModel,
    samples: Sequence[Tensor],
    tried: Sequence[Sequence[Callable[[], AbstractContextManager[object]]]],
) -> Tensor:
    """Mean KL divergence, in nats, from the model as it is to the model within each of a grid of contexts.

    Only one sample's logits are held at a time.
    """
    total = torch.zeros(len(tried), len(tried[0]), dtype=torch.float64)
    tokens = 0
    with tqdm(total=len(samples) * total.numel(), desc="sensitivity", unit="pass", disable=None) as bar:
        for sample in samples:
            ids = sample[None].to(model.device)
            stock = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            likely = stock.exp()
            for row, contexts in enumerate(tried):
                for column, context in enumerate(contexts):
                    with context():
                        other = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
                    total[row, column] += (likely * (stock - other)).sum(-1).double().sum().item()
                    bar.update()
            tokens += len(sample)
    return total / tokens
