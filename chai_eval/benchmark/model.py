"""A model of LLaMA-7B's shape with random weights: TTFT and TPOT against its own attention, and memory.

On a small machine its first layers only; `--layers 32 --device cuda --lengths 512,2048,8192 --kind full` on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from chai_eval.attention.inject import attention_shape
from chai_eval.attention.kernels.decode import multiplies
from chai_eval.benchmark.records import Row, finish, numbers, parser, positive, progress
from chai_eval.measure.contenders import BASELINE, contender
from chai_eval.measure.figures import PointFigures
from chai_eval.measure.grid import measure
from chai_eval.measure.serialise import to_json
from chai_eval.measure.settings import MeasureSettings
from chai_eval.measure.table import tables
from chai_eval.methods import build_method
from chai_eval.models import load, model_settings
from chai_eval.settings import ModelSettings

RIVALS = {BASELINE: "the model with sdpa", "mha (eager)": "the model with eager", "mha (flash)": "the model with flash"}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure, print the tables, write the record."""
    options = parser("model", __doc__, repetitions=7)
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
    source, counts = shaped(arguments)
    settings = MeasureSettings(
        arguments.kind, arguments.lengths, arguments.batch_sizes, (arguments.new_tokens,), arguments.repetitions,
        arguments.warmup,
    )  # fmt: skip
    model, _ = load(source)
    layers = attention_shape(model).layers
    name = f"model-{arguments.model}-{layers}-{arguments.clusters}-{source.dtype}-{model.device.type}"
    methods = [contender(build_method("chai", clusters=counts))]
    found = measure(model, methods, settings, source=source, progress=progress(name, arguments))
    print(tables(found.record))
    about = f"{arguments.model}, {layers} layers, → {arguments.clusters}, {source.dtype}, {arguments.device}"
    rows = [row for point in found.points for row in _rows(about, point)]
    return finish(name, rows, arguments, measured=found.record, samples=to_json(found.samples))


def shaped(arguments: argparse.Namespace) -> tuple[ModelSettings, Any]:
    """The model with random weights, and its cluster counts."""
    low = multiplies(torch.bfloat16, torch.device(arguments.device))
    source = model_settings(arguments.model)
    layers = int(source.architecture["num_hidden_layers"])
    # Rotary positions have no end; the longest measured is what it is built for.
    longest = max(arguments.lengths) + arguments.new_tokens
    changed: dict[str, Any] = {
        "path": None, "weights": "random", "tokenizer": "builtin", "device": arguments.device,
        "layers": None if arguments.layers >= layers else arguments.layers,
        "dtype": arguments.dtype or ("bfloat16" if low else "float32"),
        "config": {"max_position_embeddings": max(longest, source.architecture["max_position_embeddings"])},
    }  # fmt: skip
    published = arguments.clusters == "published"
    counts = source.clusters if published else [[int(arguments.clusters), min(arguments.layers, layers)]]
    return replace(source, **changed), counts


def _rows(about: str, point: PointFigures) -> list[Row]:
    result, setting = point.results["chai"], f"{about}, {point.length} tokens, batch {point.batch}"
    return [
        Row(what, setting, peer, result.times_as_fast_as[rival][figure], result.limit[figure].times_as_fast_as_mha)
        for figure, what in (("ttft", "TTFT"), ("tpot", "TPOT"))
        for rival, peer in RIVALS.items()
        if figure in result.times_as_fast_as.get(rival, {})
    ]
