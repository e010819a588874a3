"""How often clusters found in a bfloat16 probe differ from those of the float32 model, and what that costs.

    python -m chai_eval benchmark probe_precision --text FILE

Partitions are compared request by request and layer by layer, over the layers that are clustered. The cost is that of
the bfloat16 model under CHAI with the clusters that it finds itself, against the same with those of the float32 model.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from chai_eval.attention import Hooks, Membership, ProbePlan, apply, probe_features, probe_probabilities
from chai_eval.attention.kernels.decode import multiplies
from chai_eval.attention.membership import membership_of
from chai_eval.attention.shape import attention_layers, attention_shape
from chai_eval.benchmark.records import file_name, positive, text_parser, write
from chai_eval.calibration_file import runs
from chai_eval.data.text import batches, cut, open_text
from chai_eval.markdown import table
from chai_eval.measure.serialise import to_json
from chai_eval.methods.clusters import cluster_counts
from chai_eval.models import load, model_settings
from chai_eval.scoring.compare import kl_divergence
from chai_eval.student import student_interval

PROBE = 5
BATCH = 8
HALF = torch.bfloat16
# Where memberships are found.
FULL, HALVED = "float32 model", "bfloat16 model"
PROJECTED = "bfloat16 model, queries and keys in float32"

# By layer, the membership of every request.
Memberships = dict[int, Membership]
# From layer, queries and keys of the probe tokens `[rows, heads, probe, head_dim]` to those to look at.
Look = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cost:
    """Mean divergence over sequences (nats), Student's 95 % interval, and what that is beyond the float32 clusters'."""

    value: float
    low: float | None
    high: float | None
    samples: list[float]
    more: Cost | None = None

    @property
    def shown(self) -> str:
        """As a cell of a table."""
        return f"{self.value:.5f}" + ("" if self.low is None else f" ({self.low:.5f} to {self.high:.5f})")


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare partitions and divergences, print both, write the record."""
    options = text_parser("probe_precision", __doc__)
    options.add_argument("--clusters", help="name of a preset; the model's own clusters by default")
    options.add_argument("--requests", type=positive, default=512, help="whose partitions are compared")
    options.add_argument("--tokens", type=positive, default=128, help="tokens of a sequence")
    arguments = options.parse_args(given)
    settings = replace(model_settings(arguments.model), dtype="float32")
    model, tokenizer = load(settings)
    half = _with_weights(model, lambda weights: weights.to(HALF))
    counts = cluster_counts(arguments.clusters or settings.clusters, model)
    wanted = {layer: count for layer, count in enumerate(counts) if count < attention_shape(model).heads}
    text = open_text(arguments.text, arguments.seed)
    requests = list(itertools.islice(cut(text.documents, tokenizer, arguments.tokens), arguments.requests))
    with nullcontext() if multiplies(HALF, model.device) else _InFloat32(), torch.inference_mode():
        found = _found(model, half, requests, wanted)
        costs, partitions = _costs(model, half, requests[: arguments.sequences], found), _partitions(found)
    record = {
        "model": settings.name,
        "clusters": runs(list(counts)),
        "text": text.name,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "partitions": partitions,
        "divergence": to_json(costs, dict[str, Cost]),
    }
    print(_tables(partitions, costs))
    write("probe_precision", arguments.out / f"{file_name(f'{settings.name}-{text.name}')}.json", record)
    return record


def _found(
    model: PreTrainedModel, half: PreTrainedModel, requests: Sequence[Tensor], wanted: Mapping[int, int]
) -> dict[str, Memberships]:
    """Memberships by where they were found; those of the float32 model first."""
    found = {
        FULL: memberships(model, requests, wanted),
        "float32 model, queries and keys rounded to bfloat16": memberships(
            model, requests, wanted, lambda _, query, key: (query.to(HALF), key.to(HALF))
        ),
        HALVED: memberships(half, requests, wanted),
    }
    with _projected(half) as look:
        found[PROJECTED] = memberships(half, requests, wanted, look)
    coarse = _with_weights(model, lambda weights: weights.to(HALF).float())
    found["float32 model, weights rounded to bfloat16"] = memberships(coarse, requests, wanted)
    return found


def _with_weights(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A copy of a model with other weights; what isn't learned, such as the frequencies of positions, stays."""
    changed = copy.deepcopy(model)
    for each in changed.parameters():
        each.data = change(each.data)
    return changed


def memberships(
    model: PreTrainedModel, requests: Sequence[Tensor], wanted: Mapping[int, int], look: Look | None = None
) -> Memberships:
    """What the probe of every request (Tensor [tokens], int64) shows, by layer of which so many clusters are wanted.

    `look` gives what is looked at in place of the queries and keys that the layer attends with.
    """
    kept: dict[int, list[Membership]] = {layer: [] for layer in wanted}

    def choose(layer: int, query: Tensor, key: Tensor, scaling: float) -> Membership:
        seen = (query, key) if look is None else look(layer, query, key)
        kept[layer].append(membership_of(probe_features(probe_probabilities(*seen, scaling)), wanted[layer]))
        return kept[layer][-1]

    with apply(model, _hooks(wanted, choose)):
        for batch in batches((each[: PROBE + 1] for each in requests), BATCH):  # which later tokens don't change
            model(input_ids=batch, use_cache=False, logits_to_keep=1)
    return {
        layer: Membership(*(torch.cat([getattr(one, name) for one in each]) for name in ("cluster", "representative")))
        for layer, each in kept.items()
    }


def divergences(
    model: PreTrainedModel, requests: Sequence[Tensor], given: Mapping[str, Memberships]
) -> dict[str, Tensor]:
    """KL(MHA ‖ CHAI) of a model under memberships that are given: means over tokens, by request, in nats."""
    taken: dict[str, list[Tensor]] = {name: [] for name in given}
    for number, batch in enumerate(batches(requests, BATCH)):
        part = slice(number * BATCH, number * BATCH + len(batch))
        expected = _log_probabilities(model, batch)
        for name, found in given.items():
            known = {layer: Membership(each.cluster[part], each.representative[part]) for layer, each in found.items()}
            counts = {layer: each.clusters for layer, each in found.items()}
            with apply(model, _hooks(counts, lambda layer, *_, known=known: known[layer])):
                taken[name].append(kl_divergence(expected, _log_probabilities(model, batch)).double().mean(1))
    return {name: torch.cat(each) for name, each in taken.items()}


def _hooks(counts: Mapping[int, int], choose: Callable[..., Membership]) -> Hooks:
    """CHAI in some layers, with memberships that are chosen from (layer, query, key, scaling)."""
    plans = {
        layer: ProbePlan(clusters=count, probe_tokens=PROBE, cluster=partial(choose, layer))
        for layer, count in counts.items()
    }
    return Hooks(plans, "one_pass")


def _log_probabilities(model: PreTrainedModel, batch: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=batch[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def _costs(
    model: PreTrainedModel, half: PreTrainedModel, requests: Sequence[Tensor], found: Mapping[str, Memberships]
) -> dict[str, Cost]:
    """What CHAI costs either model by where its clusters were found."""
    plain = divergences(model, requests, {FULL: found[FULL]})
    own = divergences(half, requests, {name: found[name] for name in (FULL, HALVED, PROJECTED)})
    costs = {f"float32 model, clusters of the {FULL}": _cost(plain[FULL])}
    for name, each in own.items():
        more = None if name == FULL else _cost(each - own[FULL])
        costs[f"bfloat16 model, clusters of the {name}"] = replace(_cost(each), more=more)
    return costs


def _cost(values: Tensor) -> Cost:
    known = [None if math.isnan(each) else each for each in student_interval(values.numpy())]
    return Cost(float(values.mean()), known[0], known[1], [round(each, 6) for each in values.tolist()])


def _partitions(found: Mapping[str, Memberships]) -> dict[str, dict[str, Any]]:
    """How many partitions, and requests, differ from those of the float32 model, by where they were found."""
    shares = {}
    for name, each in found.items():
        differ = torch.stack([(each[layer].cluster != first.cluster).any(1) for layer, first in found[FULL].items()])
        by_layer = dict(zip(map(str, each), differ.sum(1).tolist(), strict=True))
        shares[name] = {
            "partitions": differ.numel(),
            "differ": int(differ.sum()),
            "requests": differ.shape[1],
            "requests_that_differ": int(differ.any(0).sum()),
            "by_layer": by_layer,
        }
    return shares


def _tables(partitions: Mapping[str, Mapping[str, Any]], costs: Mapping[str, Cost]) -> str:
    """Both comparisons as Markdown."""
    shares = [
        {
            "clusters of the": name,
            "partitions that differ": f"{each['differ']} of {each['partitions']}",
            "share": f"{100 * each['differ'] / each['partitions']:.1f} %",
        }
        for name, each in partitions.items()
    ]
    more = "more than with the float32 model's clusters"
    means = [
        {"CHAI in the": name, "KL (nats)": each.shown, more: "–" if each.more is None else each.more.shown}
        for name, each in costs.items()
    ]
    return f"{table(shares)}\n{table(means)}"


@contextmanager
def _projected(model: PreTrainedModel) -> Iterator[Look]:
    """Queries and keys made anew in float32 from what the attention of a LLaMA-like model is given."""
    given: dict[int, dict[str, Any]] = {}
    modules = attention_layers(model)

    def note(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[layer] = kwargs

    def look(layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        module: Any = modules[layer]
        states = given[layer]["hidden_states"][:, :PROBE].float()
        turn = [each[:, :PROBE].float() for each in given[layer]["position_embeddings"]]
        made = []
        for projection in (module.q_proj, module.k_proj):
            bias = None if projection.bias is None else projection.bias.float()
            flat = linear(states, projection.weight.float(), bias)
            made.append(flat.unflatten(-1, (-1, query.shape[-1])).transpose(1, 2))
        turned: tuple[Tensor, Tensor] = sys.modules[type(module).__module__].apply_rotary_pos_emb(*made, *turn)
        return turned

    with ExitStack() as hooks:
        for layer, module in modules.items():
            handle = module.register_forward_pre_hook(partial(note, layer), with_kwargs=True)
            hooks.callback(handle.remove)
        yield look


class _InFloat32(TorchFunctionMode):
    """Multiply bfloat16 in float32 and round, as processors with instructions for it do; others take minutes."""

    PRODUCTS = (linear, torch.matmul, torch.bmm, torch.Tensor.matmul, scaled_dot_product_attention)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in self.PRODUCTS or args[0].dtype != HALF:
            return function(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, lambda each: each.float() if each.dtype == HALF else each, (args, kwargs))
        return function(*args, **(kwargs or {})).to(HALF)
