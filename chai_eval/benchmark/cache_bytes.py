"""K,V bytes after the probe: what is allocated, what the formula says, what a fresh process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from chai_eval.benchmark.records import Row, finish, parser, positive, progress
from chai_eval.markdown import table
from chai_eval.measure.contenders import BASELINE, Contender, contender
from chai_eval.measure.fresh import fresh_memory
from chai_eval.measure.memory import Memory, measure_memory
from chai_eval.measure.serialise import to_json
from chai_eval.measure.settings import Point
from chai_eval.measure.statistics import Ratio
from chai_eval.measure.table import mib
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
    done, rows, lines = progress("cache_bytes", arguments), [], []
    for name in arguments.models.split(","):
        settings = shaped(name)
        found = {}
        for each in (Contender(BASELINE, "sdpa"), contender(build_method("chai", clusters=settings.clusters))):
            measure = partial(measured, settings, each, arguments.length, not arguments.no_process)
            found[each.name] = done.part(f"{name}-{each.method is None}", Memory, measure)
        rows.append(_row(f"{name}, published counts, {arguments.length} tokens, float32", found))
        lines += [{"model": name, "contender": one, **_cells(memory)} for one, memory in found.items()]
    print(table(lines, left=2))
    return finish("cache_bytes", rows, arguments)


def shaped(name: str) -> ModelSettings:
    """The attention of a model as it is, everything else small, with random weights."""
    settings = model_settings(name)
    # transformers wants a multiple of the number of heads, though head_dim is given.
    config = {**SMALL, "hidden_size": 4 * settings.architecture["num_attention_heads"]}
    return replace(
        settings, path=None, weights="random", tokenizer="builtin", dtype="float32", device="cpu", config=config
    )  # fmt: skip


def measured(settings: ModelSettings, each: Contender, length: int, fresh: bool) -> Memory:
    """Memory of a prefill."""
    model, _ = load(settings)
    found = measure_memory(model, each, Point(length, 1, 1), 0, None)
    return replace(found, fresh_process=fresh_memory(settings, each, Point(length, 1, 1), 0)) if fresh else found


def _row(setting: str, found: dict[str, Memory]) -> Row:
    full, kept = (each.prefill.cache for each in found.values())
    reached = Ratio(full.allocated_bytes / kept.allocated_bytes, None, None)
    return Row("K,V bytes", setting, "DynamicCache", reached, full.formula_bytes / kept.formula_bytes, to_json(found))


def _cells(memory: Memory) -> dict[str, str]:
    cache = memory.prefill.cache
    return {
        "allocated MiB": mib(cache.allocated_bytes, 2) or "–",
        "formula MiB": mib(cache.formula_bytes, 2) or "–",
        "off": f"{100 * (cache.allocated_bytes / cache.formula_bytes - 1):+.2f} %",
        "saved": f"{100 * cache.saved:.1f} %",
        "held by the process MiB": mib(memory.peaks.prefill.settled_above_before_bytes, 2) or "–",
    }
