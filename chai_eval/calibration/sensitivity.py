"""How much the model's predictions change when a single layer is clustered, foretold to second order.

Where heads' outputs change by δ, the KL divergence of next-token distributions is ½ E (Σ g·δ)² up to terms of third
order: the Fisher information, g being the gradient of the log-probability of tokens drawn from the model's own
predictions. One pass forth and back tells it of every layer and every count at once, so it can be taken over many
samples, where running the model under each choice could be over a few.

Of the square of the sum over tokens only the squares are kept: what changes at different tokens do together is as often
for as against, and differs so much from sample to sample that counts would hang on the text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, full_attention, probe_features, probe_probabilities, take_over
from chai_eval.attention.membership import cosine_distance, partitions
from chai_eval.attention.probe import repeat_heads
from chai_eval.calibration.observe import probabilities_at
from chai_eval.calibration.progress import progress
from chai_eval.checksum import DamagedError, read_document, write_document
from chai_eval.errors import RunError
from chai_eval.methods import Method
from chai_eval.scoring.divergence import kl_divergence

log = logging.getLogger("chai_eval")

# From probabilities [tokens, vocabulary] to a token for each.
Draw = Callable[[Tensor], Tensor]


@dataclass
class _Watched:
    """Full attention whose queries, keys, values and outputs are kept, as an `Attend` for `take_over`."""

    seen: dict[int, tuple[AttentionCall, Tensor, Tensor, Tensor]] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = full_attention(query, key, value, call.view)
        if not out.requires_grad:  # before the first layer there is nothing that does
            out.requires_grad_()
        self.seen[call.index] = (call, query.detach(), key.detach(), value.detach())
        self.outputs[call.index] = out
        return out


def layer_divergence(
    model: PreTrainedModel, samples: Sequence[Tensor], serving: Tensor, probe_tokens: int, seed: int, kept: Path
) -> tuple[Tensor, Tensor]:
    """KL divergence of next-token distributions from plain attention's when one layer alone is clustered, foretold.

    Parameters
    ----------
    samples : sequence of Tensor [tokens], int64
    serving : Tensor [layers, heads, heads], int64
        Entry (layer, k - 1, head): which head serves each head where memberships are fixed and k heads serve.
    seed : int
        Of the tokens that are drawn.
    kept : Path
        Folder for what is known of each sample, from which an interrupted measurement goes on.

    Returns
    -------
    Tensor [layers, heads], float64
        Under CHAI with k clusters, in column k - 1: mean over tokens, in nats.
    Tensor [layers, heads], float64
        Under the fixed memberships.
    """
    sums = []
    with progress(len(samples), "sensitivity", "samples") as advance, _frozen(model):
        for number, sample in enumerate(samples):
            file = kept / f"sensitivity-{number}.json"
            known = _known(file)
            if known is None:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
                found = divergences(model, sample, serving, probe_tokens, _drawing(generator))
                known = torch.stack(found).tolist()
                _keep(file, known)
            sums.append(known)
            advance(1)
    total = torch.tensor(sums, dtype=torch.float64).sum(0) / sum(map(len, samples))
    return total[0], total[1]


def _keep(file: Path, found: list[list[list[float]]]) -> None:
    try:
        write_document(file, {"divergences": found}, files={})
    except OSError as error:
        raise RunError(f"out: {file.parent} can't be written ({error.strerror or error})") from error


def _known(file: Path) -> list[list[list[float]]] | None:
    """What an interrupted measurement left of a sample, None where it left nothing or it is damaged."""
    try:
        found = read_document(file)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        log.warning("%s: %s; measured again", error.path, error.said)
        return None
    return None if found.files is None else found.content["divergences"]


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
    watched = _Watched()
    with torch.enable_grad(), take_over(model, watched):
        logits = model(input_ids=sample[None].to(model.device), use_cache=False).logits[0]
        logarithms = logits.float().log_softmax(-1)
        if not torch.isfinite(logits.amax(-1)).all():  # -inf alone rules a token out
            raise RunError("model: its predictions for the calibration text are not all finite; try dtype=float32")
        drawn = draw(logarithms.detach().exp().cpu()).to(logits.device)
        likelihood = logarithms.gather(1, drawn[:, None]).sum()
    layers = sorted(watched.outputs)
    gradients = torch.autograd.grad(likelihood, [watched.outputs[layer] for layer in layers])
    found = [
        _layer_divergences(*watched.seen[layer], gradient, serving[layer], probe_tokens)
        for layer, gradient in zip(layers, gradients, strict=True)
    ]
    chai, fixed = zip(*found, strict=True)
    return torch.stack(chai), torch.stack(fixed)


@torch.no_grad()
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
    sums = torch.zeros(len(methods), dtype=torch.float64)
    for sample in samples:
        ids = sample[None].to(model.device)
        stock = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        for number, method in enumerate(methods):
            with method.applied(model):
                other = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            sums[number] += kl_divergence(stock, other).double().sum().item()
    return (sums / sum(map(len, samples))).tolist()


@torch.no_grad()
def _layer_divergences(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, serving: Tensor, probe_tokens: int
) -> tuple[Tensor, Tensor]:
    """½ Σ (g·δ)² over tokens of one layer: `[heads]` under CHAI, and under the fixed memberships."""
    heads, tokens = query.shape[1], query.shape[2]
    every = torch.arange(tokens, device=query.device)
    probabilities = probabilities_at(every, query, key, call.view.scaling, call.view.window)[0]  # [heads, tokens, keys]
    # What it does to the likelihood that a token of a head attends to a key: [heads, tokens, keys].
    pull = torch.matmul(gradient[0].float(), repeat_heads(value, heads)[0].float().transpose(-1, -2))
    served = torch.einsum("itk,rtk->tir", pull, probabilities)  # head r's probabilities in head i's place
    change = served - served.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    probe = probe_probabilities(query[:, :, :probe_tokens], key[:, :, :probe_tokens], call.view.scaling)
    by_request = partitions(cosine_distance(probe_features(probe)))[0]

    def halved_squares(changes: Tensor, serves: Tensor) -> Tensor:
        whole = changes[:, torch.arange(heads, device=changes.device), serves].sum(-1)  # [tokens, counts]
        return whole.double().square().sum(0).cpu() / 2

    return halved_squares(change[probe_tokens:], by_request), halved_squares(change, serving.to(change.device))


def _drawing(generator: torch.Generator) -> Draw:
    return lambda likely: torch.multinomial(likely, 1, generator=generator)[:, 0]


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
