"""A greedy generation, step by step with a cache: the work that is timed, and whose memory is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from chai_eval.attention.passes import cache_in
from chai_eval.measure.clock import Clock
from chai_eval.measure_settings import Point


@dataclass
class Generation:
    """A greedy generation that goes on a forward pass at a time, of a model with a method applied, or without.

    From a prompt, `[batch, length]`, int64, to the `new` tokens so far, `[batch, 1]` each; `past` is the cache, by the
    name that the model gives it, and empty before the prefill.
    """

    model: PreTrainedModel
    prompt: Tensor
    past: dict[str, Cache] = field(default_factory=dict)
    new: list[Tensor] = field(default_factory=list)

    def forward(self) -> None:
        """A forward pass: the whole prompt at once, to the first token; then one more token each."""
        tokens = self.new[-1] if self.new else self.prompt
        out = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **self.past)
        self.past = cache_in(out)
        self.new.append(out.logits[:, -1].argmax(-1, keepdim=True))


@dataclass(frozen=True)
class Times:
    """Seconds of one generation: to the first token, and of each token after it."""

    prefill: float
    steps: tuple[float, ...]


def prompt(model: PreTrainedModel, point: Point, seed: int) -> Tensor:
    """Random tokens, other ones in every row: `[batch, length]`, int64, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (point.batch, point.length), generator=generator).to(model.device)


@torch.inference_mode()
def timed(model: PreTrainedModel, tokens: Tensor, steps: int, clock: Clock) -> Times:
    """Generate `1 + steps` tokens and time each."""
    generation = Generation(model, tokens)
    marks = [clock.mark()]
    for _ in range(1 + steps):
        generation.forward()
        marks.append(clock.mark())
    first, *rest = [clock.seconds(start, end) for start, end in pairwise(marks)]
    return Times(first, tuple(rest))


@torch.inference_mode()
def warm_up(model: PreTrainedModel, point: Point) -> None:
    """A generation of the same shape, after which libraries have the memory that they keep for good.

    Room for the products of a shape is among it (2 MiB for 1900 tokens of a small model on one processor).
    """
    generation = Generation(model, prompt(model, point, 0))
    generation.forward()
    generation.forward()
