"""K,V bytes after the probe: what is allocated, what the formula says, what a fresh process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chai_eval.benchmark.records import Row, finish, parser, positive, progress
from chai_eval.measure.contenders import contender
from chai_eval.measure.figures import Measured
from chai_eval.measure.grid import measure
from chai_eval.measure.settings import MeasureSettings
from chai_eval.measure.statistics import Ratio
from chai_eval.measure.table import tables
from chai_eval.methods import build_method
from chai_eval.models import load, model_settings
from chai_eval.settings import ModelSettings

# Layers, heads and head dimension are the models' own; what does not enter the cache is small.
SMALL = {"head_dim": 128, "intermediate_size": 128, "vocab_size": 288}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure both of the paper's LLaMAs with their published counts, print the tables, write the record."""
    options = parser("cache_bytes", __doc__)
    options.add_argument("--length", type=positive, default=256)
    options.add_argument("--models", default="llama7b,llama33b")
    options.add_argument("--no-process", action="store_true", help="leave the fresh processes out")
    arguments = options.parse_args(given)
    grid = MeasureSettings("memory", (arguments.length,), new_tokens=(1,), rivals=("sdpa",))
    done, rows = progress("cache_bytes", arguments), []
    for name in arguments.models.split(","):
        source = shaped(name)
        model, _ = load(source)
        chai = contender(build_method("chai", clusters=source.clusters))
        found = measure(model, [chai], grid, source=None if arguments.no_process else source, progress=done.of(name))
        print(tables(found.record))
        rows.append(_row(name, found))
    return finish("cache_bytes", rows, arguments)


def shaped(name: str) -> ModelSettings:
    """The attention of a model as it is, everything else small, with random weights."""
    settings = model_settings(name)
    # transformers wants a multiple of the number of heads, though head_dim is given.
    config = {**SMALL, "hidden_size": 4 * settings.architecture["num_attention_heads"]}
    return replace(
        settings, path=None, weights="random", tokenizer="builtin", dtype="float32", device="cpu", config=config
    )


def _row(name: str, found: Measured) -> Row:
    (point,) = found.points
    full, kept = (each.memory.prefill.cache for each in point.results.values() if each.memory is not None)
    reached = Ratio(full.allocated_bytes / kept.allocated_bytes, None, None)
    setting = f"{name}, published counts, {point.length} tokens, float32"
    limit = full.formula_bytes / kept.formula_bytes
    return Row("K,V bytes", setting, "DynamicCache", reached, limit, found.record)
