"""How much the model's predictions change under clustering: layer by layer to second order, whole methods measured.

Where heads' outputs change by δ, the KL divergence of next-token distributions is ½ E (Σ g·δ)² up to terms of third
order: the Fisher information, g being the gradient of the log-probability of tokens drawn from the model's own
predictions. One pass forth and back tells it of every layer and every count at once, so it can be taken over many
samples, where running the model under each choice could be over a few.

Of the square of the sum over tokens only the diagonal is summed, each token's own square. The products of two tokens'
changes have either sign equally often: they are noise, which differs so much from sample to sample that it would decide
the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.membership import cosine_distance, partitions
from chai_eval.attention.probe import repeat_heads
from chai_eval.calibration.moments import HeadMoments, head_moments
from chai_eval.calibration.observe import Seen, watching
from chai_eval.calibration.progress import SavedProgress, progress
from chai_eval.errors import RunError
from chai_eval.methods import Method
from chai_eval.scoring.compare import compare
from chai_eval.scoring.runner import Runner

# From probabilities [tokens, vocabulary] to a token for each.
Draw = Callable[[Tensor], Tensor]


class Sensitivity(NamedTuple):
    """KL divergence of next-token distributions from plain attention's when one layer alone is clustered, predicted.

    It is `[2, layers, heads]`, float64: under CHAI, and under the fixed memberships, with k clusters in column k - 1,
    mean over tokens, in nats. The moments, of the same pass, tell what storing keys and values in fewer numbers costs.
    """

    divergence: Tensor
    moments: HeadMoments


def layer_sensitivity(
    model: PreTrainedModel, samples: Sequence[Tensor], serving: Tensor | None, probe_tokens: int, seed: int, file: Path
) -> Sensitivity:
    """What changes in single layers do to predictions, from one pass forth and back over each sample.

    Parameters
    ----------
    samples : sequence of Tensor [tokens], int64
    serving : Tensor [layers, heads, heads], int64, or None
        Entry (layer, k - 1, head): which head serves each head where memberships are fixed and k heads serve. None
        leaves divergences out.
    seed : int
        Of the tokens that are drawn.
    file : Path
        With what is known, from which an interrupted measurement goes on, but for its sha256 in the name.
    """
    saved = SavedProgress(file)
    known: dict[str, Any] = {"samples": (), "moments": {}, "tokens": 0} | (saved.load() or {})
    found: list[Tensor] = list(known["samples"])
    moments = HeadMoments(known["moments"], known["tokens"])

    def state() -> dict[str, Any]:
        return {"samples": torch.stack(found), "moments": moments.sums, "tokens": moments.tokens}

    with _frozen(model):
        for number, sample in enumerate(progress(samples, len(samples), "sensitivity", "samples")):
            if number >= len(found):
                generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
                layers = with_gradients(model, sample, partial(_draw, generator=generator))
                of_layers = () if serving is None else divergences(layers, serving, probe_tokens)
                found.append(torch.stack(of_layers) if of_layers else torch.empty(0))
                before = [None, *(each.seen for each in layers)]
                moments.add([head_moments(*each, at) for each, at in zip(layers, before, strict=False)], len(sample))
                saved.offer(state)
    saved.save(state())
    return Sensitivity(torch.stack(found).sum(0) / sum(map(len, samples)), moments)


def divergences(layers: Sequence[WithGradient], serving: Tensor, probe_tokens: int) -> tuple[Tensor, Tensor]:
    """Divergences of `Sensitivity` for one sample, summed over its tokens: `[layers, heads]` each, float64."""
    found = [_layer_divergences(*each, serving[each.seen.call.index], probe_tokens) for each in layers]
    chai, fixed = zip(*found, strict=True)
    return torch.stack(chai), torch.stack(fixed)


class WithGradient(NamedTuple):
    """A layer under plain attention, and the gradient of the log-probability of drawn tokens by its heads' outputs."""

    seen: Seen
    gradient: Tensor


def with_gradients(model: PreTrainedModel, sample: Tensor, draw: Draw) -> list[WithGradient]:
    """Run one sample, `[tokens]`, forth and back; RunError for predictions that are no numbers.

    `draw` draws a token for each place from its probabilities, `[tokens, vocabulary]` to `[tokens]`, on the CPU.
    """
    layers: dict[int, Seen] = {}

    def watch(seen: Seen) -> None:
        if not seen.output.requires_grad:  # before the first layer there is nothing that does
            seen.output.requires_grad_()
        layers[seen.call.index] = seen

    with torch.enable_grad(), watching(model, [watch]):
        logits = model(input_ids=sample[None].to(model.device), use_cache=False).logits[0]
        logarithms = logits.float().log_softmax(-1)
        if not torch.isfinite(logits.amax(-1)).all():  # -inf alone rules a token out
            raise RunError("model: its predictions for the calibration text are not all finite; try dtype=float32")
        drawn = draw(logarithms.detach().exp().cpu()).to(logits.device)
        likelihood = logarithms.gather(1, drawn[:, None]).sum()
    in_order = [layers[layer] for layer in sorted(layers)]
    gradients = torch.autograd.grad(likelihood, [seen.output for seen in in_order])
    return [WithGradient(*each) for each in zip(in_order, gradients, strict=True)]


def true_divergences(model: PreTrainedModel, samples: Sequence[Tensor], methods: Sequence[Method]) -> list[float]:
    """KL divergence of next-token distributions from plain attention's under whole methods, as it is, on samples.

    Means over tokens, in nats; infinite where a method rules out a token that plain attention does not.
    """
    # Any token may follow the last one: a divergence does not depend on it.
    sequences = [(*sample.tolist(), 0) for sample in samples]
    runner = Runner(model, batch_tokens=max(map(len, samples)))
    found = compare(runner, dict(zip(map(str, count()), methods, strict=False)), sequences)
    return [sum(row["divergence"] * row["tokens"] for row in rows) / sum(map(len, samples)) for rows in found.values()]


@torch.no_grad()
def _layer_divergences(seen: Seen, gradient: Tensor, serving: Tensor, probe_tokens: int) -> tuple[Tensor, Tensor]:
    """½ Σ (g·δ)² over tokens of one layer: `[heads]` under CHAI, and under the fixed memberships."""
    heads, tokens = seen.query.shape[1], seen.query.shape[2]
    probabilities = seen.probabilities(torch.arange(tokens))[0]  # [heads, tokens, keys]
    # What it does to the likelihood that a token of a head attends to a key: [heads, tokens, keys].
    pull = torch.matmul(gradient[0].float(), repeat_heads(seen.value, heads)[0].float().transpose(-1, -2))
    served = torch.einsum("itk,rtk->tir", pull, probabilities)  # head r's probabilities in head i's place
    change = served - served.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    by_request = partitions(cosine_distance(seen.probe(probe_tokens)))[0]

    def halved_squares(changes: Tensor, serves: Tensor) -> Tensor:
        whole = changes[:, torch.arange(heads, device=changes.device), serves].sum(-1)  # [tokens, counts]
        return whole.double().square().sum(0).cpu() / 2

    return halved_squares(change[probe_tokens:], by_request), halved_squares(change, serving.to(change.device))


def _draw(likely: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(likely, 1, generator=generator)[:, 0]


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Keep gradients from the weights, for which more would have to be remembered."""
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in trained:
            each.requires_grad_(True)
