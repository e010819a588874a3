"""Predictors of which heads matter, as DejaVu trains them (Liu et al., ICML 2023): two linear layers without bias."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

WIDTH = 1000
LEARNING_RATE = 1e-3
TOKENS_PER_STEP = 256
# Shares of heads that are dropped; each label says at how many of them the head stays.
SPARSITIES = (0.1, 0.3, 0.5)


class Predictors:
    """One predictor a layer, trained together.

    Layer l's predictor is fed the input of attention in layer l - 1 (the first layer's its own), so that it can be
    asked while the layer before is still at work.

    Attributes
    ----------
    down : Tensor [layers, width, hidden]
    up : Tensor [layers, heads, width]
    """

    def __init__(self, layers: int, heads: int, hidden: int, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.down = (torch.randn(layers, WIDTH, hidden, generator=generator) * hidden**-0.5).to(device)
        self.up = (torch.randn(layers, heads, WIDTH, generator=generator) * WIDTH**-0.5).to(device)
        for weight in (self.down, self.up):
            weight.requires_grad_()
        self.optimizer = torch.optim.Adam([self.down, self.up], lr=LEARNING_RATE)

    def train(self, inputs: Tensor, norms: Tensor) -> None:
        """Go on learning from a batch of tokens.

        Parameters
        ----------
        inputs : Tensor [layers, tokens, hidden]
            See `fed`.
        norms : Tensor [layers, tokens, heads]
            Norm of each head's output before the output projection.
        """
        labels = kept_heads(norms, SPARSITIES)
        for x, y in zip(inputs.split(TOKENS_PER_STEP, 1), labels.split(TOKENS_PER_STEP, 1), strict=True):
            with torch.enable_grad():
                loss = binary_cross_entropy_with_logits(self.scores(x), y, reduction="none").mean((1, 2)).sum()
                gradients = torch.autograd.grad(loss, [self.down, self.up])
            self.down.grad, self.up.grad = gradients
            self.optimizer.step()

    def scores(self, inputs: Tensor) -> Tensor:
        """`[layers, tokens, hidden]` to a score of every head, `[layers, tokens, heads]`: higher is more needed."""
        return inputs @ self.down.transpose(1, 2) @ self.up.transpose(1, 2)

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimizer's state, to go on from."""
        state = {"down": self.down.detach(), "up": self.up.detach()}
        for at, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"{name}.{at}": value for name, value in moments.items()}
        return state

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        whole = self.optimizer.state_dict()
        for key, value in state.items():
            name, _, at = key.partition(".")
            if at:
                whole["state"].setdefault(int(at), {})[name] = value
            else:
                getattr(self, name).data.copy_(value)
        self.optimizer.load_state_dict(whole)


def fed(inputs: Sequence[Tensor]) -> Tensor:
    """What predictors read: the input of the layer before, `[layers, tokens, hidden]` in float32."""
    return torch.stack([inputs[max(layer - 1, 0)].float() for layer in range(len(inputs))])


def kept_heads(norms: Tensor, sparsities: Sequence[float]) -> Tensor:
    """At how large a share of the sparsities each head is among the ⌈(1 - s) H⌉ with the largest norms; 0 to 1."""
    heads = norms.shape[-1]
    rank = norms.argsort(-1, descending=True).argsort(-1)
    kept = [rank < math.ceil((1 - sparsity) * heads) for sparsity in sparsities]
    return torch.stack(kept).float().mean(0)


def recall(scores: Tensor, norms: Tensor, sparsity: float) -> Tensor:
    """Share of the true top heads that are among the predicted ones, of every layer: `[layers]`."""
    keep = math.ceil((1 - sparsity) * norms.shape[-1])
    true, predicted = (
        torch.zeros_like(each, dtype=torch.bool).scatter_(-1, each.topk(keep, -1).indices, True)
        for each in (norms, scores)
    )
    return (true & predicted).sum(-1).float().mean(-1) / keep
