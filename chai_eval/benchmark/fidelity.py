"""How far each method's predictions move from plain attention's at one K,V saving: on text, token by token.

    python -m chai_eval benchmark fidelity --model smollm2_mha --text FILE

needs a calibration of the model. Counts, memberships and representatives are taken from it at one preset. The elbow
rows go as far towards the elbows of error curves as comes closest to the preset's saving; a calibration has such curves
where its rule uses them: `--elbows` names one made with rule=elbow, without any these rows are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from chai_eval.attention.membership import partitions
from chai_eval.attention.shape import attention_shape
from chai_eval.benchmark.records import file_name, positive, text_parser, write
from chai_eval.calibration.choice import column, only_what_saves, serving_by_count
from chai_eval.calibration.counts import elbows, kv_saving, towards
from chai_eval.calibration_file import PRESETS, calibration, runs
from chai_eval.data.text import open_text
from chai_eval.markdown import table
from chai_eval.methods import Method, build_method
from chai_eval.methods.clusters import cluster_counts
from chai_eval.models import load, model_settings
from chai_eval.scoring.fidelity import Fidelity, fidelities, plain
from chai_eval.scoring.runner import Runner

# Shares of the way to the elbows that are tried.
SHARES = [step / 100 for step in range(5, 201)]


def main(given: Sequence[str] | None = None) -> dict[str, Fidelity]:
    """Compare all, print the table, write the record."""
    options = text_parser("fidelity", __doc__)
    options.add_argument("--calibration", help="a folder; the model's own by default")
    options.add_argument("--elbows", help="a calibration with error curves; the same by default")
    options.add_argument("--preset", default="balanced", choices=PRESETS)
    options.add_argument("--tokens", type=positive, default=256, help="tokens of a sequence")
    options.add_argument("--counts", type=json.loads, help="cluster counts of your own, such as [[9,17],[3,13]]")
    arguments = options.parse_args(given)
    settings = model_settings(arguments.model)
    model, tokenizer = load(settings)
    known = arguments.calibration or settings.name
    methods = at_one_saving(model, known, arguments.elbows or known, arguments.preset, arguments.counts)
    text = open_text(arguments.text, arguments.seed)
    chosen = {name: method for name, (method, _) in methods.items()}
    lengths = {"tokens": arguments.tokens, "sequences": arguments.sequences}
    found = fidelities(Runner(model, tokenizer), chosen, text.documents, **lengths)
    print(table([_line(name, methods[name][1], each) for name, each in found.items()]))
    record = {
        "model": settings.name,
        "preset": arguments.preset,
        "text": text.name,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "methods": {name: _record(*methods[name], each) for name, each in found.items()},
    }
    # One for each preset and text, so that none takes another's place.
    name = f"{settings.name}-{arguments.preset}-{file_name(text.name)}"
    write("fidelity", arguments.out / f"{name}.json", record)
    return found


def at_one_saving(
    model: Any, name: str, elbows_of: str, preset: str, own: list[Any] | None = None
) -> dict[str, tuple[Method, float | None]]:
    """Methods by name, each with the share of the K,V cache that it saves (None where members share values too)."""
    known = calibration(name)
    known.check(model)
    shape = attention_shape(model)
    kept, cost = (known.tensor(each).double() for each in ("kept_kv_heads", "output_cost"))
    counts = list(cluster_counts(known.description["presets"][preset]["clusters"], model))
    saving = kv_saving(counts, kept, shape.kv_heads)
    same = {"budget": counts}
    found: dict[str, tuple[Method, float | None]] = {}
    if (with_curves := calibration(elbows_of)).has("error_curves"):
        with_curves.check(model)
        bends = elbows(with_curves.tensor("error_curves").double())
        by_curve = [only_what_saves(towards(bends, shape.heads, share), kept, shape.kv_heads) for share in SHARES]
        same["elbow"] = elbow = min(by_curve, key=lambda each: abs(kv_saving(each, kept, shape.kv_heads) - saving))
        saved = kv_saving(elbow, kept, shape.kv_heads)
        found["chai, elbow counts"] = (build_method("chai", clusters=runs(elbow)), saved)
    found |= {
        "chai, budget counts, first": (build_method("chai", clusters=runs(counts)), saving),
        "chai, budget counts, medoid": (build_method("chai", clusters=runs(counts), representative="medoid"), saving),
        "v_reuse, budget counts": (build_method("v_reuse", clusters=runs(counts)), None),
    }
    if own is not None:
        same["given"] = mine = list(cluster_counts(own, model))
        found["chai, given counts"] = (build_method("chai", clusters=own), kv_saving(mine, kept, shape.kv_heads))
    for features in ("last_row", "probe"):
        static = column(partitions(known.tensor(f"distance.{features}").double()), counts).tolist()
        found[f"chai_static, {features}"] = (build_method("chai_static", membership=static), saving)
    by_count = serving_by_count(cost, shape.kv_heads)
    for label, given in same.items():
        serving = column(by_count, given).tolist()
        at = kv_saving(given, kept, shape.kv_heads)
        found[f"output_aware, chai's {label} counts"] = (build_method("output_aware", membership=serving), at)
    served = float(known.description["presets"][preset]["output_aware"]["kv_saving"])
    for adaptive in (False, True):
        method = build_method("output_aware", membership=str(known.folder), preset=preset, adaptive=adaptive)
        found["output_aware, own counts" + (", adaptive" if adaptive else "")] = (method, served)
    return found


def _line(name: str, saving: float | None, found: Fidelity) -> dict[str, str]:
    mean = found.divergence
    return {
        "method": name,
        "K,V saved": "–" if saving is None else f"{100 * saving:.1f} %",
        "KL (nats)": f"{mean.value:.4f}",
        "95 % interval": "–" if math.isnan(mean.low) else f"{mean.low:.4f} to {mean.high:.4f}",
        "same token": f"{100 * found.agreement.value:.1f} %",
        "perplexity": f"{found.perplexity:.2f} (MHA {found.baseline_perplexity:.2f})",
    }


def _record(method: Method, saving: float | None, found: Fidelity) -> dict[str, Any]:
    divergences = found.samples["divergence"]
    return {
        "kv_saving": saving,
        "settings": {"name": method.name, **method.settings()},
        **plain(found),
        "positions": json.loads(found.positions.to_json(orient="records", double_precision=6)),
        "sequences": found.sequences,
        "per_sequence": [round(value, 6) if math.isfinite(value) else None for value in divergences],
    }
