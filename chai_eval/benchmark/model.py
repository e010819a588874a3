"""Models with random weights: TTFT and TPOT against their own attention, memory, and bytes of the cache alone.

`model` takes the first layers only; `--layers 32 --device cuda --lengths 512,2048,8192 --kind full` on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from chai_eval.attention.kernels.decode import multiplies
from chai_eval.attention.shape import attention_shape
from chai_eval.benchmark.records import Row, finish, numbers, parser, positive, progress
from chai_eval.measure.contenders import BASELINE, contender
from chai_eval.measure.figures import PointFigures, Sample
from chai_eval.measure.grid import measure
from chai_eval.measure.serialise import to_json
from chai_eval.measure.statistics import Ratio
from chai_eval.measure.table import tables
from chai_eval.measure_settings import MeasureSettings
from chai_eval.methods import build_method
from chai_eval.models import load, model_settings
from chai_eval.settings import ModelSettings

RIVALS = {BASELINE: "the model with sdpa", "mha (eager)": "the model with eager", "mha (flash)": "the model with flash"}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """A model of LLaMA-7B's shape with random weights: TTFT and TPOT against its own attention, and memory."""
    options = parser("model", main.__doc__, repetitions=7)
    options.add_argument("--model", default="llama7b")
    options.add_argument("--layers", type=positive, default=4)
    options.add_argument("--clusters", default="4", help="clusters of every layer, or published for the paper's counts")
    options.add_argument("--dtype", help="bfloat16, or float32 on a CPU that has no instructions for it")
    options.add_argument("--lengths", type=numbers, default=[1024, 2048])
    options.add_argument("--batch-sizes", type=numbers, default=[1])
    options.add_argument("--new-tokens", type=positive, default=17)
    options.add_argument("--warmup", type=int, default=1)
    options.add_argument("--kind", default="latency", choices=["latency", "memory", "full"])
    arguments = options.parse_args(given)
    source, counts = _cut(arguments)
    settings = MeasureSettings(
        arguments.kind, arguments.lengths, arguments.batch_sizes, (arguments.new_tokens,), arguments.repetitions,
        arguments.warmup,
    )  # fmt: skip
    model, _ = load(source)
    layers = attention_shape(model).layers
    name = f"model-{arguments.model}-{layers}-{arguments.clusters}-{source.dtype}-{model.device.type}"
    methods = [contender(build_method("chai", clusters=counts))]
    done = progress(name, arguments)
    found = measure(model, methods, settings, source=source, progress=done)
    print(tables(found.record))
    about = f"{arguments.model}, {layers} layers, → {arguments.clusters}, {source.dtype}, {arguments.device}"
    rows = [row for point in found.points for row in _rows(about, point)]
    return finish(done, rows, measured=found.record, samples=to_json(found.samples, list[Sample]))


def cache_bytes(given: Sequence[str] | None = None) -> list[Row]:
    """K,V bytes after the probe: what is allocated, what the formula says, what a fresh process holds."""
    options = parser("cache_bytes", cache_bytes.__doc__)
    options.add_argument("--length", type=positive, default=256)
    options.add_argument("--models", default="llama7b,llama33b", help="each with its published counts")
    options.add_argument("--no-process", action="store_true", help="leave the fresh processes out")
    arguments = options.parse_args(given)
    settings = MeasureSettings("memory", (arguments.length,), new_tokens=(1,), rivals=("sdpa",))
    done, rows = progress("cache_bytes", arguments), []
    for name in arguments.models.split(","):
        # Layers, heads and head dimension are the model's own; what does not enter the cache is small.
        small = {"head_dim": 128, "intermediate_size": 128, "vocab_size": 288}
        # transformers wants a multiple of the number of heads, though head_dim is given.
        small["hidden_size"] = 4 * model_settings(name).architecture["num_attention_heads"]
        source = _random(name, dtype="float32", device="cpu", config=small)
        methods = [contender(build_method("chai", clusters=source.clusters))]
        fresh = None if arguments.no_process else source
        found = measure(load(source)[0], methods, settings, source=fresh, progress=done.of(name))
        print(tables(found.record))
        full, kept = (each.memory.prefill.cache for each in found.points[0].results.values() if each.memory)
        reached, limit = full.allocated_bytes / kept.allocated_bytes, full.formula_bytes / kept.formula_bytes
        setting = f"{name}, published counts, {arguments.length} tokens, float32"
        rows.append(Row("K,V bytes", setting, "DynamicCache", Ratio(reached, None, None), limit, found.record))
    return finish(done, rows)


def _random(name: str, **changed: Any) -> ModelSettings:
    """A model with random weights."""
    return replace(model_settings(name), path=None, weights="random", tokenizer="builtin", **changed)


def _cut(arguments: argparse.Namespace) -> tuple[ModelSettings, Any]:
    """The model's first layers, and their cluster counts."""
    low = multiplies(torch.bfloat16, torch.device(arguments.device))
    architecture = model_settings(arguments.model).architecture
    layers = min(arguments.layers, int(architecture["num_hidden_layers"]))
    # Rotary positions have no end; the longest measured is what it is built for.
    longest = max(max(arguments.lengths) + arguments.new_tokens, architecture["max_position_embeddings"])
    source = _random(
        arguments.model,
        layers=None if layers == architecture["num_hidden_layers"] else layers,
        dtype=arguments.dtype or ("bfloat16" if low else "float32"),
        device=arguments.device,
        config={"max_position_embeddings": longest},
    )
    return source, source.clusters if arguments.clusters == "published" else [[int(arguments.clusters), layers]]


def _rows(about: str, point: PointFigures) -> list[Row]:
    result, setting = point.results["chai"], f"{about}, {point.length} tokens, batch {point.batch}"
    return [
        Row(what, setting, peer, result.times_as_fast_as[rival][figure], result.limit[figure].times_as_fast_as_mha)
        for figure, what in (("ttft", "TTFT"), ("tpot", "TPOT"))
        for rival, peer in RIVALS.items()
        if figure in result.times_as_fast_as.get(rival, {})
    ]
