"""Second moments of what heads ask and are asked, weighted by what predictions make of it: what `kv_rank` is made from.

To first order, storing E k in place of each key k changes a head's output o at one token by what its score errors make
of it, and the log-probability of a drawn token, whose gradient by the output is g, by qᵀ(E − 1)u, where
u = Σ A (g·v − g·o) k runs over the keys, A being the probabilities. Storing E v in place of values changes it by
gᵀ(E − 1)o. Half the mean square of either is the KL divergence (`sensitivity`), so that keys and values of all heads
and layers are weighed in nats. Taken apart into the moments of q and u, and of g and o, each is minimised by an
eigendecomposition.

The first token's key is left out of u: many heads rest on it, it lies far from all others, and is cached as it is.

Beside them goes what it does to predictions when a layer takes the attention probabilities of the layer before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from chai_eval.attention.probe import repeat_heads
from chai_eval.calibration.observe import Seen
from chai_eval.methods.moments import GRADIENT, KINDS, LAYER_SHARE, OUTPUT, PULL, QUERY, pack


@torch.no_grad()
def head_moments(seen: Seen, gradient: Tensor, before: Seen | None = None) -> dict[str, Tensor]:
    """Sums over the tokens of one sample, float64, on the CPU.

    By the names of `KINDS` moments of the vectors that `head_vectors` gives: `[heads, head_dim, head_dim]`.
    By `LAYER_SHARE` half the squares of what the log-probability changes by when the layer takes the attention
    probabilities of the one `before`; 0 for the first layer, which has none before it.
    """
    moments = {name: _squares(each).cpu() for name, each in head_vectors(seen, gradient).items()}
    own, value = seen.output[0].float(), repeat_heads(seen.value, seen.output.shape[1])[0].float()
    tokens = torch.arange(value.shape[1])
    taken = own if before is None else torch.matmul(before.probabilities(tokens)[0].to(value.device), value)
    change = (gradient[0].float() * (taken - own)).sum((0, 2)).double()
    return {**moments, LAYER_SHARE: change.square().sum().cpu() / 2}


def head_vectors(seen: Seen, gradient: Tensor) -> dict[str, Tensor]:
    """What asks each head and what is asked, token by token, by the names of `KINDS`: `[heads, tokens, head_dim]`.

    The layer is seen under plain attention, of one row; the gradient, `[1, heads, tokens, head_dim]`, is that of the
    log-probability of what was drawn, by the layer's `output`.
    """
    heads, tokens = seen.query.shape[1], seen.query.shape[2]
    key, value = (repeat_heads(each, heads)[0].float() for each in (seen.key, seen.value))
    gradient, output = gradient[0].float(), seen.output[0].float()
    pull = torch.matmul(gradient, value.transpose(-1, -2)) - (gradient * output).sum(-1, keepdim=True)
    weights = seen.probabilities(torch.arange(tokens))[0] * pull
    asked = torch.matmul(weights[..., 1:], key[:, 1:])
    found = (seen.query[0].float() * seen.call.view.scaling, asked, gradient, output)
    return dict(zip(KINDS, found, strict=True))


def _squares(vectors: Tensor) -> Tensor:
    vectors = vectors.double()
    return torch.matmul(vectors.transpose(-1, -2), vectors)


class HeadMoments:
    """Moments of all layers, `[layers, ...]`, float64, summed over the tokens of samples by `head_moments`' names."""

    def __init__(self, sums: Mapping[str, Tensor] | None = None, tokens: int = 0) -> None:
        self.sums, self.tokens = dict(sums or {}), tokens

    def add(self, layers: Sequence[Mapping[str, Tensor]], tokens: int) -> None:
        """Add a sample: what `head_moments` gave of each layer."""
        for name in layers[0]:
            new = torch.stack([layer[name] for layer in layers])
            self.sums[name] = self.sums[name] + new if name in self.sums else new
        self.tokens += tokens

    def tensors(self, kv_heads: int) -> dict[str, Tensor]:
        """As a calibration has them, see `calibration_file`."""
        mean = {name: each / self.tokens for name, each in self.sums.items()}
        pooled = {}
        for asking, asked in ((QUERY, PULL), (GRADIENT, OUTPUT)):
            pooled[asking], pooled[asked] = pooled_heads(mean[asking], mean[asked], kv_heads)
        packed = {name: pack(each) for name, each in pooled.items()}
        return {
            **{name: each.factors for name, each in packed.items()},
            "scale": torch.stack([packed[name].scale for name in KINDS]).float(),
            LAYER_SHARE: mean[LAYER_SHARE].float(),
        }


def pooled_heads(asking: Tensor, asked: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Moments of the key heads, `[layers, kv_heads, n, n]`, from those of their readers, `[layers, heads, n, n]`.

    The errors of all readers are summed. Their askers are averaged by how much each is asked for, so that the product
    of both traces is that sum where readers ask alike.
    """
    asking, asked = (each.unflatten(1, (kv_heads, -1)) for each in (asking, asked))
    weight = asked.diagonal(dim1=-2, dim2=-1).sum(-1)
    weight = weight / weight.sum(2, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight[..., None, None] * asking).sum(2), asked.sum(2)
