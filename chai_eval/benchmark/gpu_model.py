"""A model of LLaMA-7B's shape with random weights on a GPU: TTFT, TPOT and memory, plain attention beside methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from chai_eval.attention import (
    AttentionCall,
    Hooks,
    Membership,
    Plan,
    ProbePlan,
    Source,
    apply,
    membership_of,
    probe_features,
    probe_probabilities,
)  # fmt: skip
from chai_eval.attention.decode_graph import decoding_steps, in_rows
from chai_eval.attention.low_rank import LayerRanks, LowRank, SameRank, low_rank_attention
from chai_eval.attention.shape import attention_shape
from chai_eval.benchmark.gpu_report import GpuRow, Report
from chai_eval.measure.clock import clock_for, in_turn, seconds_of, undisturbed
from chai_eval.measure.generation import Generation
from chai_eval.resources import paper_dir

PROBE = 5
FEW = 4


@dataclass(frozen=True)
class Rival:
    """A contender: its hooks (None for the model's own attention), and heads or shares that each layer keeps.

    `scores` are query and key heads that each layer has; `numbers` the share of a key or value that is cached.
    """

    name: str
    hooks: Hooks | None
    scores: list[int]
    numbers: float = 1.0
    note: str | None = None

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Run the model as this contender while the context lasts."""
        with nullcontext() if self.hooks is None else apply(model, self.hooks):
            yield


class _OneRank(Hooks):
    """Every head's keys and values in their first dimensions alone: what `kv_rank` computes, without its moments."""

    fixed_steps = True

    def __init__(self, ranks: LayerRanks) -> None:
        super().__init__()
        self.ranks = ranks

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        return low_rank_attention(self.ranks, source, call.view, call.store)


def random_model(device: torch.device, *, tiny: bool) -> PreTrainedModel:
    """A model of LLaMA-7B's shape, or a tiny one."""
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, vocab_size=97 if tiny else 32000, max_position_embeddings=16384)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = LlamaForCausalLM._from_config(
            config, dtype=torch.float32 if tiny else torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(False)


def rivals(model: PreTrainedModel) -> list[Rival]:
    """Plain attention, CHAI at the published counts and with 4 clusters everywhere, and keys and values of low rank."""
    shape = attention_shape(model)
    heads, layers = shape.heads, shape.layers
    known = json.loads((paper_dir() / "cluster_counts.json").read_text(encoding="utf-8"))["llama7b"]
    # All heads in its first layers, few clusters in the others; of a tiny model in as many for its size.
    (_, whole), (few, _) = known["runs"]
    published = [heads if layer < whole * layers // known["layers"] else few for layer in range(layers)]
    rank = 3 * shape.head_dim // 4
    dtype, device = model.dtype, model.device
    axes = torch.eye(shape.head_dim, dtype=dtype, device=device)[:rank].expand(shape.kv_heads, -1, -1).contiguous()
    group = SameRank(torch.arange(shape.kv_heads, device=device), rank, axes, axes)
    low = LowRank(shape.kv_heads, shape.head_dim, (group,))
    return [
        Rival("mha (sdpa)", None, [heads] * layers),
        Rival("chai, published counts", _clustering(published, heads), published),
        Rival(f"chai, {heads} → {FEW}", _clustering([FEW] * layers, heads), [FEW] * layers),
        Rival(
            f"kv_rank, {shape.head_dim} → {rank}", _OneRank(LayerRanks(low, low)), [heads] * layers,
            rank / shape.head_dim, "the first dimensions: no moments are known of random weights",
        ),
    ]  # fmt: skip


def _clustering(counts: list[int], heads: int) -> Hooks:
    plans: dict[int, Plan] = {
        layer: ProbePlan(clusters=count, probe_tokens=PROBE, cluster=partial(_cluster, count))
        for layer, count in enumerate(counts)
        if count < heads
    }
    return Hooks(plans)


def _cluster(clusters: int, query: Tensor, key: Tensor, scaling: float) -> Membership:
    return membership_of(probe_features(probe_probabilities(query, key, scaling)), clusters)


def work(model: PreTrainedModel, rival: Rival, batch: int, queries: int, past: int) -> tuple[float, float]:
    """Bytes and operations of a pass: weights and cache read once, products of weights and of attention.

    `queries` new tokens of each request come after `past` ones; logits are those of the last.
    """
    shape, size = attention_shape(model), model.dtype.itemsize
    narrow = 0.0
    for module in model.modules():
        for name in ("q_proj", "k_proj"):
            if isinstance(projection := getattr(module, name, None), torch.nn.Linear):
                kept = rival.scores[int(module.layer_idx)] / shape.heads  # type: ignore[arg-type]
                narrow += projection.weight.numel() * (1 - kept)
    head = model.get_output_embeddings().weight.numel()
    inner = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear)) - head
    numbers = sum(each + shape.kv_heads for each in rival.scores) * shape.head_dim * rival.numbers
    pairs = queries * past + queries * (queries + 1) / 2
    flops = 2 * batch * (queries * (inner - narrow) + head + pairs * numbers)
    # A prompt's probe needs all of the weights.
    weights = inner + head - (narrow if queries == 1 else 0)
    return size * (weights + batch * (past + queries) * numbers), flops


@torch.inference_mode()
def timed(model: PreTrainedModel, report: Report, length: int, batch: int, repetitions: int) -> None:
    """TTFT and TPOT of every contender at one point, in turn, and what is held; two rows for each."""
    vocabulary, clock = model.config.vocab_size, clock_for(model.device)
    tokens = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))
    tokens, setting = tokens.to(model.device), f"{length} tokens, batch {batch}"
    contenders = rivals(model)

    def prefill(rival: Rival) -> float:
        with rival.applied(model), undisturbed():
            return seconds_of(clock, Generation(model, tokens).forward)

    runs: dict[str, Callable[[], float]] = {each.name: partial(prefill, each) for each in contenders}
    firsts: dict[str, list[float]] = {each.name: [] for each in contenders}
    for turn in in_turn(runs, repetitions, warmup=1):
        firsts[turn.contender].append(turn.found)
    for each in contenders:
        limit = report.machine.seconds(*work(model, each, batch, length, 0))
        report.add(GpuRow("TTFT", setting, each.name, firsts[each.name], limit, note=each.note))
        report.add(_steps(model, report, each, tokens, repetitions))


def _steps(model: PreTrainedModel, report: Report, rival: Rival, tokens: Tensor, repetitions: int) -> GpuRow:
    """The step after a prompt, run again and again behind the same tokens: SDPA then needs no mask either."""
    (batch, length), cuda = tokens.shape, model.device.type == "cuda"
    clock, notes = clock_for(model.device), [rival.note] if rival.note else []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with rival.applied(model):
        generation = Generation(model, tokens)
        generation.forward()
    ((name, cache),) = generation.past.items()
    past = {name: in_rows(cache)} if rival.hooks is None else dict(generation.past)  # type: ignore[arg-type]
    token = generation.new[-1]
    del cache, generation
    with (
        apply(model, rival.hooks or Hooks()),
        decoding_steps(model, past, token, 1, again=True) as (steps, why),
        undisturbed(),
    ):
        seconds = [seconds_of(clock, steps.step) for _ in range(2 + 5 * repetitions)][2:]
        held = _held(past)
    if why is not None:
        notes.append(why)
    limit = report.machine.seconds(*work(model, rival, batch, 1, length))
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return GpuRow(
        "TPOT", f"{length} tokens, batch {batch}", rival.name, seconds, limit, why is None, held, peak,
        "; ".join(notes) or None,
    )  # fmt: skip


def _held(past: Mapping[str, object]) -> int:
    return sum(layer.nbytes() for cache in past.values() for layer in cache.layers)  # type: ignore[attr-defined]
