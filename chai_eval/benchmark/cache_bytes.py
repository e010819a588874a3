"""K,V bytes after the probe: what is allocated, what the formula says, what a fresh process holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chai_eval.benchmark.common import Row, finish, parser
from chai_eval.markdown import markdown
from chai_eval.measure.contenders import BASELINE, Contender, contender
from chai_eval.measure.fresh import fresh_memory
from chai_eval.measure.memory import measure_memory
from chai_eval.measure.room import OutOfMemory
from chai_eval.measure.settings import Point
from chai_eval.measure.statistics import Ratio
from chai_eval.methods import build_method
from chai_eval.models import load, model_settings
from chai_eval.settings import ModelSettings

MIB = 1 << 20
# Layers, heads and head dimension are the models' own; what does not enter the cache is small.
SMALL = {"head_dim": 128, "intermediate_size": 128, "vocab_size": 288}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure both of the paper's LLaMAs with their published counts, print the tables, write the record."""
    options = parser(__doc__, repetitions=1)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--models", default="llama7b,llama33b")
    options.add_argument("--no-process", action="store_true", help="leave the fresh processes out")
    arguments = options.parse_args(given)
    rows, lines = [], []
    for name in arguments.models.split(","):
        found = measured(shaped(name), Point(arguments.length, 1, 1), fresh=not arguments.no_process)
        rows.append(_row(name, arguments.length, found))
        lines += [_line(name, each, figures) for each, figures in found.items()]
    columns = ["model", "contender", "allocated MiB", "formula MiB", "off", "saved", "held by the process MiB"]
    print("\n".join(markdown(columns, lines)) + "\n")
    return finish("cache_bytes", rows, arguments)


def shaped(name: str) -> ModelSettings:
    """The attention of a model as it is, everything else small, with random weights."""
    settings = model_settings(name)
    # transformers wants a multiple of the number of heads, though head_dim is given.
    config = {**SMALL, "hidden_size": 4 * settings.architecture["num_attention_heads"]}
    return replace(
        settings, path=None, weights="random", tokenizer="builtin", dtype="float32", device="cpu", config=config
    )


def measured(settings: ModelSettings, point: Point, *, fresh: bool) -> dict[str, dict[str, Any]]:
    """Sizes after the prefill by contender."""
    options = {"clusters": settings.clusters}
    model, _ = load(settings)
    found: dict[str, dict[str, Any]] = {}
    for each in (Contender(BASELINE, "sdpa"), contender(build_method("chai", **options), options)):
        found[each.name] = {"cache": measure_memory(model, each, point, 0, None)["prefill"]["cache"]}
        if fresh:
            process = fresh_memory(settings, each, point, 0)
            assert not isinstance(process, OutOfMemory), "a few hundred MiB are needed"
            found[each.name]["process"] = process
    return found


def _row(name: str, length: int, found: dict[str, dict[str, Any]]) -> Row:
    full, kept = (each["cache"] for each in found.values())
    reached = full["allocated_bytes"] / kept["allocated_bytes"]
    limit = full["formula_bytes"] / kept["formula_bytes"]
    setting = f"{name}, published counts, {length} tokens, float32"
    return Row("K,V bytes", setting, "DynamicCache", Ratio(reached, None, None), 0.99 * limit, limit, found)


def _line(model: str, name: str, figures: dict[str, Any]) -> list[str]:
    cache = figures["cache"]
    held = figures["process"]["prefill"]["settled_above_before_bytes"] / MIB if "process" in figures else None
    return [
        model,
        name,
        f"{cache['allocated_bytes'] / MIB:.2f}",
        f"{cache['formula_bytes'] / MIB:.2f}",
        f"{100 * (cache['allocated_bytes'] / cache['formula_bytes'] - 1):+.2f} %",
        f"{100 * (1 - cache['allocated_bytes'] / cache['full_bytes']):.1f} %",
        "–" if held is None else f"{held:.2f}",
    ]


if __name__ == "__main__":
    main()
