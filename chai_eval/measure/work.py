"""Work: operations and bytes that a phase can't do without, counted from the model's shapes.

Bytes are those of weights, keys and values, each read once; activations are left out, as a chip may keep them. The time
at the machine's ceiling is therefore a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_layers, attention_shape
from chai_eval.methods.base import LayerFootprint


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiplication and an addition are two) and bytes moved."""

    flops: float
    bytes: float

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Time where operations and bytes each go at full speed, beside each other."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


@dataclass(frozen=True)
class Pass:
    """A forward pass: `queries` new tokens of each of `batch` requests that have `past` tokens already.

    Where it is `causal` only pairs that a query sees count; a kernel that computes the whole square does more.
    """

    batch: int
    queries: int
    past: float = 0
    causal: bool = True

    def pairs(self, first: int = 0, last: int | None = None) -> float:
        """Pairs of a query in columns `first` to `last - 1` of the pass and a key that it sees, in one request."""
        last = self.queries if last is None else last
        n = last - first
        if not self.causal:
            return n * (self.past + self.queries)
        return n * self.past + (first + 1 + last) * n / 2


def pass_work(model: PreTrainedModel, layers: Sequence[LayerFootprint], run: Pass) -> dict[str, Work]:
    """What a forward pass asks for at least, part by part.

    Parts are `projections` (of queries, keys and values; narrow ones of queries and keys are counted where a layer has
    `q_proj` and `k_proj`), `attention`, `other layers`, `head` (logits of the last token).
    """
    shape, head = attention_shape(model), model.get_output_embeddings()
    whole = LayerFootprint.full(shape)
    projections: dict[nn.Linear, Work] = {}
    for index, module in attention_layers(model).items():
        kept = layers[index]
        shares = {
            "q_proj": kept.scores / whole.scores,
            "k_proj": kept.keys / whole.keys,
            "v_proj": kept.values / whole.values,
        }
        for name, share in shares.items():
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Linear):
                projections[projection] = _linear(projection, run, share, _early(kept, run))
    linear = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    parts = {
        "projections": _sum(projections.values()),
        "attention": _sum(attention_work(each, whole, shape.head_dim, model.dtype.itemsize, run) for each in layers),
        "other layers": _sum(_linear(each, run) for each in linear if each not in projections),
    }
    if isinstance(head, nn.Linear):
        parts["head"] = _linear(head, Pass(run.batch, 1))
    return parts


def attention_work(layer: LayerFootprint, whole: LayerFootprint, head_dim: int, size: int, run: Pass) -> Work:
    """What the attention of one layer asks for: scores, values, and keys and values read and the new ones written.

    `whole` is the layer under plain attention; a number has `size` bytes.
    """
    probe = _early(layer, run)
    early, late = run.pairs(0, probe), run.pairs(probe)
    held = layer.share_held(max(round(run.past) + run.queries, 1))
    products = early * 2 * whole.scores * head_dim + late * held * layer.multiplications(head_dim)
    new = sum(layer.bytes_per_token(head_dim, size, 1))  # a single token is held by every method
    return Work(2 * run.batch * products, run.batch * new * (layer.read * held * run.past + 2 * run.queries))


def total(parts: dict[str, Work]) -> Work:
    """All parts together."""
    return _sum(parts.values())


def _sum(several: Iterable[Work]) -> Work:
    each = list(several)
    return Work(sum((one.flops for one in each), 0.0), sum((one.bytes for one in each), 0.0))


def _early(layer: LayerFootprint, run: Pass) -> int:
    """Of the tokens of a pass, those that every head attends to on its own."""
    return min(layer.probe_tokens, run.queries) if run.past == 0 else 0


def _linear(layer: nn.Linear, run: Pass, share: float = 1.0, early: int = 0) -> Work:
    """A linear layer of whose output the tokens after the `early` ones need only a share."""
    weight = layer.weight
    tokens = early + (run.queries - early) * share
    read = share if early == 0 else 1.0  # the probe needs all of the weights
    return Work(2 * run.batch * tokens * weight.numel(), weight.numel() * weight.element_size() * read)
