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

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.membership import cosine_distance, partitions
from chai_eval.attention.probe import repeat_heads
from chai_eval.calibration.observe import Seen, watching
from chai_eval.calibration.progress import SavedProgress, progress
from chai_eval.errors import RunError
from chai_eval.methods import Method
from chai_eval.scoring.compare import compare
from chai_eval.scoring.runner import Runner

# From probabilities [tokens, vocabulary] to a token for each.
Draw = Callable[[Tensor], Tensor]


def layer_divergence(
    model: PreTrainedModel, samples: Sequence[Tensor], serving: Tensor, probe_tokens: int, seed: int, file: Path
) -> tuple[Tensor, Tensor]:
    """KL divergence of next-token distributions from plain attention's when one layer alone is clustered, predicted.

    Parameters
    ----------
    samples : sequence of Tensor [tokens], int64
    serving : Tensor [layers, heads, heads], int64
        Entry (layer, k - 1, head): which head serves each head where memberships are fixed and k heads serve.
    seed : int
        Of the tokens that are drawn.
    file : Path
        With what is known, from which an interrupted measurement goes on, but for its sha256 in the name.

    Returns
    -------
    Tensor [layers, heads], float64
        Under CHAI with k clusters, in column k - 1: mean over tokens, in nats.
    Tensor [layers, heads], float64
        Under the fixed memberships.
    """
    saved = SavedProgress(file)
    found: list[Tensor] = list((saved.load() or {"samples": ()})["samples"])
    with _frozen(model):
        for number, sample in enumerate(progress(samples, len(samples), "sensitivity", "samples")):
            if number >= len(found):
                generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
                draw = partial(_draw, generator=generator)
                found.append(torch.stack(divergences(model, sample, serving, probe_tokens, draw)))
                saved.offer(lambda: {"samples": torch.stack(found)})
    by_sample = torch.stack(found)  # [samples, 2, layers, heads]
    saved.save({"samples": by_sample})
    chai, fixed = by_sample.sum(0) / sum(map(len, samples))
    return chai, fixed


def divergences(
    model: PreTrainedModel, sample: Tensor, serving: Tensor, probe_tokens: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """The same of one sample and the tokens that are drawn for it, summed over its tokens.

    Parameters
    ----------
    sample : Tensor [tokens], int64
    draw : callable
        Draws a token for each place from its probabilities, `[tokens, vocabulary]` to `[tokens]`, on the CPU.

    Raises
    ------
    RunError
        For predictions that are no numbers.
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
    found = [
        _layer_divergences(seen, gradient, serving[seen.call.index], probe_tokens)
        for seen, gradient in zip(in_order, gradients, strict=True)
    ]
    chai, fixed = zip(*found, strict=True)
    return torch.stack(chai), torch.stack(fixed)


def true_divergences(model: PreTrainedModel, samples: Sequence[Tensor], methods: Sequence[Method]) -> list[float]:
    """KL divergence of next-token distributions from plain attention's under whole methods, as it is.

    Parameters
    ----------
    samples : sequence of Tensor [tokens], int64

    Returns
    -------
    list of float
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
