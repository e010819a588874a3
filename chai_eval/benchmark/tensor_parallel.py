"""What it costs that heads of different devices can't share a cluster, where a model is split over several.

    python -m chai_eval benchmark tensor_parallel --model smollm2_mha --text FILE

needs a calibration of the model. One process finds clusters within each device's heads, as the devices would; where
these don't divide the heads, some have one more than others. A layer that a preset leaves fewer clusters than there are
devices keeps one on each, which saves less: beside that stand counts chosen anew for the preset's saving, by the same
costs, with a cluster for every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.benchmark import paired
from chai_eval.benchmark.records import file_name, numbers, positive, text_parser, write
from chai_eval.calibration.counts import kv_saving, within_budget
from chai_eval.calibration_file import PRESETS, Calibration, calibration, runs
from chai_eval.data.text import open_text
from chai_eval.markdown import table
from chai_eval.methods import Method, build_method
from chai_eval.methods.clusters import cluster_counts
from chai_eval.methods.costs import described_costs
from chai_eval.models import load, model_settings
from chai_eval.scoring.fidelity import Fidelity, fidelities
from chai_eval.scoring.runner import Runner


def main(given: Sequence[str] | None = None) -> dict[str, Fidelity]:
    """Compare all, print the table, write the record."""
    options = text_parser("tensor_parallel", __doc__)
    options.add_argument("--tokens", type=positive, default=256, help="tokens of a sequence")
    options.add_argument("--devices", type=numbers, default=[2, 3, 4], help="how many there are, such as 2,3,4")
    options.add_argument("--calibration", help="a folder; the model's own by default")
    options.add_argument("--preset", default="balanced", choices=PRESETS)
    arguments = options.parse_args(given)
    settings = model_settings(arguments.model)
    model, tokenizer = load(settings)
    known = arguments.calibration or settings.name
    methods = on_devices(model, [1, *arguments.devices], known, arguments.preset)
    text = open_text(arguments.text, arguments.seed)
    lengths = {"tokens": arguments.tokens, "sequences": arguments.sequences}
    chosen = {name: method for name, (method, _) in methods.items()}
    found = fidelities(Runner(model, tokenizer), chosen, text.documents, **lengths)
    held = {name: described_costs(method, model)["of_mha"]["held"] for name, method in chosen.items()}
    lines = {name: paired.line(name, each, found[methods[name][1]], "more than on one") for name, each in found.items()}
    print(table([{**each, "K,V held": f"{100 * held[name]:.1f} %"} for name, each in lines.items()]))
    record = {
        "rows": [],  # of the table of promises: none
        "model": settings.name,
        "preset": arguments.preset,
        "text": text.name,
        "seed": arguments.seed,
        **lengths,
        "methods": {
            name: {
                "kv_held": held[name],
                **paired.record(chosen[name], each, found[methods[name][1]], "more_than_on_one_device"),
            }
            for name, each in found.items()
        },
    }
    name = f"{settings.name}-{arguments.preset}-{file_name(text.name)}"
    write("tensor_parallel", arguments.out / f"{name}.json", record)
    return found


def on_devices(
    model: PreTrainedModel, devices: Sequence[int], calibrated: str, preset: str
) -> dict[str, tuple[Method, str]]:
    """Methods at a calibration's preset on so many devices, each with the name of the same on the first number."""
    known = calibration(calibrated)
    known.check(model)
    clusters = list(cluster_counts(known.description["presets"][preset]["clusters"], model))
    found: dict[str, tuple[Method, str]] = {}
    for count in devices:
        chai = partial(build_method, "chai", tensor_parallel=count)
        found[_name("chai", count)] = (chai(clusters=runs(clusters)), _name("chai", devices[0]))
        anew = counts_from(known, clusters, attention_shape(model).kv_heads, count)
        if anew != clusters:
            found[_name("chai", count) + ", same saving"] = (chai(clusters=runs(anew)), _name("chai", devices[0]))
    for count in devices:
        method = build_method("output_aware", membership=calibrated, preset=preset, tensor_parallel=count)
        found[_name("output_aware", count)] = (method, _name("output_aware", devices[0]))
    return found


def counts_from(known: Calibration, clusters: Sequence[int], kv_heads: int, least: int) -> list[int]:
    """Counts that save as much as those given, or as much as can be, at the least cost; none of them below `least`."""
    if min(clusters) >= least:
        return list(clusters)
    cost, kept = (known.tensor(name).double() for name in ("predicted_divergence", "kept_kv_heads"))
    fewer = least - 1  # counts of which there are no columns any more
    found = within_budget(cost[:, fewer:], kept[:, fewer:], kv_heads, kv_saving(clusters, kept, kv_heads))
    return [count + fewer for count in found]


def _name(method: str, count: int) -> str:
    return f"{method}, {count} device{'' if count == 1 else 's'}"
