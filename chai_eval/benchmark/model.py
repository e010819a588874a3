"""A model of LLaMA-7B's shape with random weights: TTFT and TPOT against its own attention, and memory.

On a small machine its first layers only; `--layers 32 --device cuda --lengths 512,2048,8192 --kind full` on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from chai_eval.attention.kernels.products import multiplies
from chai_eval.benchmark.common import Row, finish, numbers, parser
from chai_eval.measure.contenders import BASELINE, contender
from chai_eval.measure.grid import measure
from chai_eval.measure.settings import MeasureSettings
from chai_eval.measure.statistics import Ratio
from chai_eval.measure.table import tables
from chai_eval.methods import build_method
from chai_eval.models import load, model_settings

RIVALS = {BASELINE: "the model with sdpa", "mha (eager)": "the model with eager", "mha (flash)": "the model with flash"}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure, print the tables, write the record."""
    options = parser(__doc__, repetitions=7)
    options.add_argument("--model", default="llama7b")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--clusters", default="4", help="clusters of every layer, or published for the paper's counts")
    options.add_argument("--dtype", help="bfloat16, or float32 on a CPU that has no instructions for it")
    options.add_argument("--lengths", type=numbers, default=[1024, 2048])
    options.add_argument("--batch-sizes", type=numbers, default=[1])
    options.add_argument("--new-tokens", type=int, default=17)
    options.add_argument("--warmup", type=int, default=1)
    options.add_argument("--kind", default="latency", choices=["latency", "memory", "full"])
    arguments = options.parse_args(given)
    low = multiplies(torch.bfloat16, torch.device(arguments.device))
    dtype = arguments.dtype or ("bfloat16" if low else "float32")
    settings = MeasureSettings(
        arguments.kind, arguments.lengths, arguments.batch_sizes, (arguments.new_tokens,),
        arguments.repetitions, arguments.warmup,
    )  # fmt: skip
    source = model_settings(arguments.model)
    layers = int(source.architecture["num_hidden_layers"])
    kept = None if arguments.layers >= layers else arguments.layers
    # Rotary positions have no end; the longest measured is what it is built for.
    longest = max(arguments.lengths) + arguments.new_tokens
    config = {"max_position_embeddings": max(longest, source.architecture["max_position_embeddings"])}
    source = replace(
        source, path=None, weights="random", tokenizer="builtin", layers=kept, dtype=dtype,
        device=arguments.device, config=config,
    )  # fmt: skip
    published = arguments.clusters == "published"
    counts = source.clusters if published else [[int(arguments.clusters), kept or layers]]
    model, _ = load(source)
    chai = contender(build_method("chai", clusters=counts), {"clusters": counts})
    found = measure(model, [chai], settings, source=source)
    print(tables(found.record))
    about = f"{arguments.model}, {kept or layers} layers, → {arguments.clusters}, {dtype}, {arguments.device}"
    rows = [row for point in found.record["points"] for row in _rows(about, point)]
    name = "-".join(["model", arguments.model, str(kept or layers), arguments.clusters, dtype, model.device.type])
    return finish(name, rows, arguments, measured=found.record, samples=found.samples)


def _rows(about: str, point: dict[str, Any]) -> list[Row]:
    result = point["results"]["chai"]
    rows = []
    for figure, what in (("ttft", "TTFT"), ("tpot", "TPOT")):
        for rival, peer in RIVALS.items():
            found = result.get("times_as_fast_as", {}).get(rival, {}).get(figure)
            if found is not None:
                limit = result["limit"][figure]["times_as_fast_as_mha"]
                setting = f"{about}, {point['length']} tokens, batch {point['batch']}"
                rows.append(Row(what, setting, peer, Ratio(**found), None, limit))
    return rows


if __name__ == "__main__":
    main()
