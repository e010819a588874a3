"""Decoding in steps of fixed shapes that ask the host nothing, which a GPU runs as one captured graph.

A step of a few thousand small operations takes longer to ask for than to do; captured once and replayed it costs one
launch. For that nothing may depend on what the host knows: room is made ahead, and tokens are counted on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from chai_eval.attention.cache import ClusteredCache
from chai_eval.attention.inject import taken_over
from chai_eval.attention.row_layer import OF_FIRST_TOKENS, RowLayer

# Steps before the capture: libraries choose their kernels, and take their memory, in the first of a shape.
WARM_UP = 3


class NotFixedError(ValueError):
    """Decoding has no steps of fixed shapes; the message says why."""


class DecodingSteps:
    """Greedy decoding from a filled cache, a token of every row in each step.

    Attributes
    ----------
    token : Tensor [batch, 1], int64
        The last one of every row; each step overwrites it.
    logits : Tensor [batch, 1, vocabulary]
        That the last step chose by; a captured one overwrites them.
    done : int
        Steps so far.
    graph : CUDAGraph or None
        The captured step; None where steps are run one operation after the other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        past: Mapping[str, Cache],
        token: Tensor,
        steps: int,
        *,
        again: bool = False,
        positions: Tensor | None = None,
    ) -> None:
        """Make room for so many steps, and run one to no effect, in which a method gathers what all others need.

        Parameters
        ----------
        model : PreTrainedModel
            With a method put in.
        past : mapping of str to Cache
            The cache, filled under that method, by the name that the model takes it by.
        token : Tensor [batch, 1], int64
            The next one of every row.
        again : bool
            Every step is the first one again, behind the same tokens; so `steps` is 1.
        positions : Tensor [batch, 1], int64, or None
            Of these tokens; None for the number of those before them, as the model counts where none was padding.

        Raises
        ------
        NotFixedError
            Where the method's steps are not all alike, or some row has not seen its probe.
        """
        self.layers = _fixed_layers(model, past)
        first, device = self.layers[0], token.device
        assert first.lengths is not None
        self.model, self.past, self.again = model, dict(past), again
        self.most, self.done = steps, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.seen = first.seen
        self.token, self.lengths = token.clone(), first.lengths.clone()
        given = torch.full_like(token, self.seen) if positions is None else positions.to(device)
        self.positions = given.clone()
        for layer in self.layers:
            layer.reserve(1 if again else steps, self.lengths)
        self.logits = self._to_no_effect()

    def step(self) -> Tensor:
        """Decode the next token of every row: `[batch, 1]`, int64; ValueError where no room is left."""
        if not self.again and self.done == self.most:
            raise ValueError(f"steps: {self.done + 1} asked for; allowed: the {self.most} that room was made for")
        if self.graph is None:
            self.logits = self._step()
        else:
            self.graph.replay()
        self.done += 1
        return self.token

    def capture(self) -> None:
        """Capture the step as a CUDA graph; RuntimeError where something in it can't be captured."""

        def warm_up() -> None:
            for _ in range(WARM_UP):
                self._to_no_effect()

        def step() -> None:
            self.logits = self._step()

        before = self._counted()
        graph = captured_graph(step, self.token.device, warm_up=warm_up)
        self._count(before)
        self.graph = graph

    def release(self) -> None:
        """Hand the cache back, with the tokens of all steps in it but the last one's own."""
        tokens = 0 if self.again else self.done
        for layer in self.layers:
            layer.release(tokens)
            layer.seen = self.seen + tokens

    def _step(self) -> Tensor:
        out = self.model(
            input_ids=self.token, position_ids=self.positions, use_cache=True, logits_to_keep=1, **self.past
        )
        self.token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        if not self.again:
            self.positions.add_(1)
            self.lengths.add_(1)
        return out.logits

    def _to_no_effect(self) -> Tensor:
        """A step whose token is forgotten; what it stores the next one overwrites."""
        before = self._counted()
        logits = self._step()
        self._count(before)
        return logits

    def _counted(self) -> tuple[Tensor, ...]:
        return tuple(each.clone() for each in (self.token, self.positions, self.lengths))

    def _count(self, before: tuple[Tensor, ...]) -> None:
        for each, value in zip((self.token, self.positions, self.lengths), before, strict=True):
            each.copy_(value)
        for layer in self.layers:
            layer.seen = self.seen


def captured_graph(
    work: Callable[[], object], device: torch.device, *, warm_up: Callable[[], object]
) -> torch.cuda.CUDAGraph:
    """Some work as a CUDA graph, after a `warm_up` beside the stream; RuntimeError where it can't be captured."""
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        warm_up()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@contextmanager
def decoding_steps(
    model: PreTrainedModel, past: Mapping[str, Cache], token: Tensor, steps: int, *, again: bool = False
) -> Iterator[tuple[DecodingSteps, str | None]]:
    """Steps of a decoding as `DecodingSteps` says, captured on a GPU; with them why they are not, None where they are.

    The cache is handed back in the end. NotFixedError as there.
    """
    found = DecodingSteps(model, past, token, steps, again=again)
    try:
        yield found, _captured(found)
    finally:
        found.release()


def _captured(steps: DecodingSteps) -> str | None:
    if steps.token.device.type != "cuda":
        return f"{steps.token.device.type} has no graphs"
    try:
        steps.capture()
    except RuntimeError as error:
        torch.cuda.synchronize(steps.token.device)
        return f"can't be captured ({' '.join(str(error).split())[:200]})"
    return None


def in_rows(cache: DynamicCache) -> ClusteredCache:
    """A cache that the model's own attention filled, without padding, as one that `Hooks` with no changes go on from.

    It is emptied, so that nothing is held twice. NotFixedError for layers that keep a window only, or anything but keys
    and values.
    """
    plain = [layer for layer in cache.layers if type(layer) is DynamicLayer]
    if cache.offloading or len(plain) < len(cache.layers):
        raise NotFixedError("the cache has layers that are not whole on the device")
    found = ClusteredCache(len(plain))
    for layer, held in zip(found.rows, plain, strict=True):
        keys, values = held.keys, held.values
        assert keys is not None
        assert values is not None
        layer.keys, layer.values = keys, values
        layer.lengths = torch.full((len(keys),), keys.shape[2], device=keys.device)
        layer.width, layer.aligned = keys.shape[2], True
        layer.count(keys.shape[2])
        held.keys = held.values = None
        held.is_initialized = False
    return found


def _fixed_layers(model: PreTrainedModel, past: Mapping[str, Cache]) -> list[RowLayer]:
    handle = taken_over(model)
    if handle is None or not handle.fixed_steps:
        raise NotFixedError("the method's steps are not all alike")
    layers = [layer for cache in past.values() for layer in cache.layers if isinstance(layer, RowLayer)]
    first = layers[0] if layers else None
    if first is None or first.lengths is None:
        raise NotFixedError("the cache is empty")
    if any(layer.state.keys() - OF_FIRST_TOKENS for layer in layers):
        raise NotFixedError("the method remembers what its tokens did")
    if int(first.lengths.min()) < max(first.probe_tokens, 1):
        raise NotFixedError("some row has not seen its probe")
    return layers
