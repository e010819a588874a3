"""From two finished results to one row of the table, and from a run to the lines above it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chai_eval.errors import RunError
from chai_eval.report.metrics import Measured, difference, measured, samples_of
from chai_eval.report.tables import Header, Row
from chai_eval.task_settings import told

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from chai_eval.evaluation import Result
    from chai_eval.methods import Method
    from chai_eval.session import LoadedModel
    from chai_eval.settings import Settings


def row(
    task: str,
    primary: str | None,
    mha: Result,
    other: Result | None,
    paper: float | None,
    fidelity: Mapping[str, Any] | None = None,
) -> Row:
    """Compare a method with its baseline on one task.

    Parameters
    ----------
    primary
        The metric to show; the task's first one where None.
    other
        Result of the method, None when the baseline stands alone.
    paper
        The paper's figure.
    fidelity
        How close the method's predictions are to the baseline's, as its record has it.

    Raises
    ------
    RunError
        Where the two results are not about the same documents, or one lacks what the other has.
    """
    metrics: Mapping[str, Any] = mha.record["metrics"]
    metric = primary if primary is not None and primary in metrics else next(iter(metrics))
    before = measured_in(mha, metric)
    n = int(mha.record["n_documents"])
    if other is None:
        return Row(task, metric, n, before.value, percent=before.percent, paper=paper)
    for each in (mha, other):  # one without checksums may be damaged
        if metric not in each.record["metrics"] or "doc_hash" not in each.samples:
            raise RunError(f"{each.folder.path} lacks {metric} or doc_hash; move the folder away to score again")
    if mha.samples["doc_hash"].tolist() != other.samples["doc_hash"].tolist():
        raise RunError(f"{task}: {mha.folder.path} and {other.folder.path} are not about the same documents")
    after = measured_in(other, metric)
    close = fidelity or {}
    divergence, agreement = ((close.get(name) or {}).get("value") for name in ("divergence", "agreement"))
    infinite = int(close.get("infinite_tokens", 0))
    return Row(
        task, metric, n, before.value, after.value, difference(before, after), before.percent, paper,
        math.inf if infinite else divergence, agreement, infinite, close.get("tokens"),
    )  # fmt: skip


def describe(settings: Settings, loaded: LoadedModel, method: Method) -> Header:
    """Say what the table is about: model, method with its settings, documents, folder."""
    model, task = settings.model, settings.task
    source = f" ({model.path})" if model.path else ""
    weights = ", random weights" if model.weights == "random" else ""
    options = "".join(f", {name} {brief(value)}" for name, value in method.settings().items())
    prompts = told(task.prompts.as_config())
    documents = "all" if task.limit is None else f"the first {task.limit} of each task"
    facts = (
        ("model", f"{model.name}{source}{weights}, {loaded.dtype} on {loaded.device}"),
        ("method", method.name + options),
        *(() if method.name == "mha" else (("costs", cost_line(method, loaded.model)),)),
        ("documents", documents),
        *((("prompts", ", ".join(prompts)),) if prompts else ()),
        *((("scoring", "decode: token by token through the cache"),) if settings.scoring == "decode" else ()),
        ("results", str(settings.results_dir / model.name)),
    )
    return Header(method.name, facts, in_paper=model.paper is not None)


def cost_line(method: Method, model: PreTrainedModel) -> str:
    """What a method costs while it decodes, as shares of plain attention's costs."""
    from chai_eval.methods.costs import described_costs

    found = described_costs(method, model)
    held, read, products = (f"{100 * found['of_mha'][name]:.1f} %" for name in ("held", "read", "multiplications"))
    line = f"K,V bytes held {held}, read by a decoded token {read}, its multiplications {products} of MHA's"
    return f"{line} (the saving is simulated)" if found["simulated"] else line


def measured_in(result: Result, metric: str) -> Measured:
    """A metric of a result, by document where the samples tell."""
    samples, column = samples_of(result.samples, metric)
    return measured(samples.get(column), float(result.record["metrics"][metric]["value"]))


def brief(value: Any) -> str:
    """Write cluster counts as runs, `9×17 3×13` for 17 layers of 9 and 13 of 3, and a calibration by its hash."""
    if isinstance(value, dict) and "sha256" in value:
        return " ".join(["of calibration", value["sha256"][:8], *(str(value[key]) for key in value if key != "sha256")])
    if not isinstance(value, list | tuple) or not value:
        return str(value)
    if all(isinstance(run, list | tuple) and len(run) == 2 for run in value):
        runs = [(count, layers) for count, layers in value]
    else:
        runs = []
        for count in value:
            if runs and runs[-1][0] == count:
                runs[-1] = (count, runs[-1][1] + 1)
            else:
                runs.append((count, 1))
    return " ".join(f"{count}×{layers}" for count, layers in runs)
