"""Predictors of which heads matter, as DejaVu trains them (Liu et al., ICML 2023): two linear layers without bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from chai_eval.calibration.observe import Seen, observe
from chai_eval.methods.keep import kept_count

WIDTH = 1000
LEARNING_RATE = 1e-3
TOKENS_PER_STEP = 256
# Shares of heads that are dropped; each label says at how many of them the head stays.
SPARSITIES = (0.1, 0.3, 0.5)


class HeadOutputs:
    """What predictors are fed and what they should tell, at some columns `[n]` of a pass: a watcher for `observe`."""

    def __init__(self, columns: Tensor) -> None:
        self._columns = columns
        self._inputs: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}

    def __call__(self, seen: Seen) -> None:
        columns = self._columns.to(seen.output.device)
        self._inputs[seen.call.index] = seen.hidden[:, columns].float()
        self._norms[seen.call.index] = seen.output[:, :, columns].float().norm(dim=-1).transpose(1, 2)

    def inputs(self) -> Tensor:
        """The input of attention in the layer before, `[layers, tokens, hidden]`; the first layer's is its own."""
        inputs = [self._inputs[max(layer - 1, 0)] for layer in range(len(self._inputs))]
        return torch.stack(inputs).flatten(1, 2)

    def norms(self) -> Tensor:
        """Norm of each head's output before the output projection, `[layers, tokens, heads]`."""
        return torch.stack([each for _, each in sorted(self._norms.items())]).flatten(1, 2)


class Predictors:
    """One predictor a layer, `down` `[layers, width, hidden]` and `up` `[layers, heads, width]`, trained together.

    Layer l's predictor is fed the input of attention in layer l - 1, so that it can be asked while the layer before is
    still at work.
    """

    def __init__(self, layers: int, heads: int, hidden: int, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.down = (torch.randn(layers, WIDTH, hidden, generator=generator) * hidden**-0.5).to(device)
        self.up = (torch.randn(layers, heads, WIDTH, generator=generator) * WIDTH**-0.5).to(device)
        for weight in (self.down, self.up):
            weight.requires_grad_()
        self.optimizer = torch.optim.Adam([self.down, self.up], lr=LEARNING_RATE)

    def train(self, outputs: HeadOutputs) -> None:
        """Go on learning from a batch of tokens."""
        inputs, norms = outputs.inputs(), outputs.norms()
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

    def state(self) -> dict[str, Any]:
        """Weights and the optimizer's state, to go on from."""
        return {"down": self.down.detach(), "up": self.up.detach(), "optimizer": self.optimizer.state_dict()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.down.data.copy_(state["down"])
        self.up.data.copy_(state["up"])
        self.optimizer.load_state_dict(state["optimizer"])


def kept_heads(norms: Tensor, sparsities: Sequence[float]) -> Tensor:
    """At how large a share of the sparsities each head is among the ⌈(1 - s) H⌉ with the largest norms; 0 to 1."""
    rank = norms.argsort(-1, descending=True).argsort(-1)
    return torch.stack([rank < kept_count(norms.shape[-1], each) for each in sparsities]).float().mean(0)


def recall(scores: Tensor, norms: Tensor, sparsity: float) -> Tensor:
    """Share of the true top heads that are among the predicted ones, of every layer: `[layers]`."""
    keep = kept_count(norms.shape[-1], sparsity)
    true, predicted = (
        torch.zeros_like(each, dtype=torch.bool).scatter_(-1, each.topk(keep, -1).indices, True)
        for each in (norms, scores)
    )
    return (true & predicted).sum(-1).float().mean(-1) / keep


def recalls(model: PreTrainedModel, predictors: Predictors, samples: Sequence[Tensor]) -> dict[str, Any]:
    """Share of the true top heads that predictors find on samples they haven't learnt from, by sparsity and layer."""
    by_sample = []
    for sample in samples:
        outputs = HeadOutputs(torch.arange(len(sample)))
        observe(model, [sample[None]], [outputs])
        scores, norms = predictors.scores(outputs.inputs()), outputs.norms()
        by_sample.append(torch.stack([recall(scores, norms, each) for each in SPARSITIES]))
    mean = torch.stack(by_sample).mean(0)  # [sparsities, layers]
    return {
        str(sparsity): {"mean": round(float(each.mean()), 4), "layers": [round(float(one), 4) for one in each]}
        for sparsity, each in zip(SPARSITIES, mean, strict=True)
    }
