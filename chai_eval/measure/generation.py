"""A greedy generation, step by step with a cache: the work that is timed, and whose memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from chai_eval.attention import Hooks, apply
from chai_eval.attention.decode_graph import NotFixedError, decoding_steps, in_rows
from chai_eval.attention.inject import taken_over
from chai_eval.attention.passes import cache_in
from chai_eval.measure.clock import Clock

if TYPE_CHECKING:
    from chai_eval.measure_settings import Point

# Said of steps that a GPU runs as one graph; of others, why they are run one operation after the other.
CAPTURED, EAGER = "captured", "not captured: "


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
    """Seconds of one generation: to the first token, and of each token after it, whose steps are `CAPTURED` or why not.

    None where a captured one was not asked for, as on a CPU.
    """

    prefill: float
    steps: tuple[float, ...]
    decoding: str | None = None


def prompt(model: PreTrainedModel, point: Point, seed: int) -> Tensor:
    """Random tokens, other ones in every row: `[batch, length]`, int64, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (point.batch, point.length), generator=generator).to(model.device)


@torch.inference_mode()
def timed(model: PreTrainedModel, tokens: Tensor, steps: int, clock: Clock) -> Times:
    """Generate `1 + steps` tokens and time each.

    On a GPU the steps are captured as one graph, for the model's own attention and for methods alike; making room for
    them and capturing, which a server does once, are not timed.
    """
    generation = Generation(model, tokens)
    marks = [clock.mark()]
    generation.forward()
    marks.append(clock.mark())
    with prepared(generation, steps, capture=model.device.type == "cuda") as (step, decoding):
        later = [marks[-1] if decoding is None else clock.mark()]
        for _ in range(steps):
            step()
            later.append(clock.mark())
        return Times(
            clock.seconds(*marks), tuple(clock.seconds(start, end) for start, end in pairwise(later)), decoding
        )


@contextmanager
def prepared(generation: Generation, steps: int, *, capture: bool) -> Iterator[tuple[Callable[[], object], str | None]]:
    """What decodes one more token, so many times, after the prefill; and how, where it was to be captured.

    The model's own attention goes on from the cache that it filled, in rows: its steps are then those of methods.
    """
    if not steps or not capture:
        yield generation.forward, None
        return
    model, past, own = generation.model, generation.past, taken_over(generation.model) is None
    ((name, cache),) = past.items()
    if own and model.config._attn_implementation != "sdpa":
        yield generation.forward, f"{EAGER}the model's own attention is {model.config._attn_implementation}"
        return
    try:
        if own and isinstance(cache, DynamicCache):
            past = {name: in_rows(cache)}
        with (
            apply(model, Hooks()) if own else nullcontext(),
            decoding_steps(model, past, generation.new[-1], steps) as (found, why),
        ):
            yield found.step, CAPTURED if why is None else EAGER + why
    except NotFixedError as error:
        yield generation.forward, EAGER + str(error)


@torch.inference_mode()
def warm_up(model: PreTrainedModel, point: Point) -> None:
    """A generation of the same shape, after which libraries have the memory that they keep for good.

    Room for the products of a shape is among it (2 MiB for 1900 tokens of a small model on one processor).
    """
    generation = Generation(model, prompt(model, point, 0))
    generation.forward()
    generation.forward()
