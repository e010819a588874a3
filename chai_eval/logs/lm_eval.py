"""lm-eval's logs, as `lm_eval --log_samples --output_path` writes them: read, and written of our own results.

A run leaves `results_<date>.json` and for each task `samples_<task>_<date>.jsonl`, one line per document and filter;
both are JSON, and nothing in them is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from chai_eval.checksum import read_json
from chai_eval.errors import RunError, failure_line
from chai_eval.files import write_whole
from chai_eval.logs.lines import row_of
from chai_eval.logs.log import Found, TaskLog
from chai_eval.logs.results import finished
from chai_eval.store.record import read_samples

SAMPLES = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
# Between a prompt and a choice, unless the task says otherwise.
DELIMITER = " "


def find(folder: Path) -> Iterator[Found]:
    """Every log of samples in a folder and below it; those in one folder, named by the model, are of one run."""
    for path in sorted(folder.rglob("samples_*.jsonl")):
        if match := SAMPLES.fullmatch(path.name):
            yield Found(match[1], str(path.parent), match[2], path, partial(read, path))


def read(path: Path) -> TaskLog:
    """Read the log of a task's samples and what the run's results, beside it, say of it.

    Raises
    ------
    RunError
        For a file or a line that can't be read.
    """
    match = SAMPLES.fullmatch(path.name)
    if match is None:
        raise RunError(f"{path}: not a log of samples, whose name is samples_<task>_<date>.jsonl")
    task, when = match[1], match[2]
    beside = sorted(path.parent.glob(f"*_{when}.json"))
    results = _results(beside[0]) if beside else {}
    delimiter = _within(results, "configs", task).get("target_delimiter", DELIMITER)
    samples = pd.DataFrame(_rows(path, str(delimiter)))
    expected = _within(results, "n-samples", task).get("effective")
    lost = isinstance(expected, int) and samples["doc_id"].nunique() != expected
    # What is reported is of all documents: nothing to check against where some are missing.
    metrics = _reported(_within(results, "results", task)) if beside and not lost else _means(samples)
    if not metrics:
        raise RunError(f"{path}: has no score of a document; allowed: the log of a task that lm-eval scored")
    if len(samples["filter"].unique()) == 1:
        samples = samples.drop(columns="filter")
    model = results.get("model_name") or path.parent.name
    source = " ".join(str(each) for each in (results.get("model_source"), model) if each)
    version = results.get("versions", {}).get(task)
    version = None if version is None else str(version)
    return TaskLog(task, source, metrics, samples, version, expected if lost else None)


def _results(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as error:
        raise RunError(f"{path}: can't be read ({error.strerror or error})") from error
    if not isinstance(found, dict):
        raise RunError(f"{path}: holds no results")
    return found


def _within(results: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inside = results.get(name)
        results = inside if isinstance(inside, dict) else {}
    return results


def _rows(path: Path, delimiter: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            rows.extend(row_of(json.loads(line), delimiter) for line in file)
    except OSError as error:
        raise RunError(f"{path}: can't be read ({error.strerror or error})") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RunError(f"{path}, line {len(rows) + 1}: damaged ({failure_line(error)})") from error
    if not rows:
        raise RunError(f"{path}: has no documents")
    return rows


def _reported(entries: Mapping[str, Any]) -> dict[str, float]:
    """lm-eval's `{"acc,none": …, "acc_stderr,none": …}` as `{"acc": …}`."""
    found = {}
    for entry, value in entries.items():
        metric, _, kind = entry.partition(",")
        if kind and not metric.endswith("_stderr") and isinstance(value, int | float):
            found[metric if kind == "none" else f"{metric} ({kind})"] = float(value)
    return found


def _means(samples: pd.DataFrame) -> dict[str, float]:
    """Of a run whose results are missing: metrics that are scores from 0 to 1, which are surely averaged."""
    found = {}
    for kind, rows in samples.groupby("filter", sort=False):
        for name in rows.columns.difference(["doc_id"], sort=False):
            scores = rows[name].dropna()
            if len(scores) and pd.api.types.is_numeric_dtype(scores) and scores.between(0, 1).all():
                found[name if kind == "none" else f"{name} ({kind})"] = float(scores.mean())
    return found


def write(folder: Path, out: Path) -> Path:
    """Write a result of ours as lm-eval would have logged it, so that what reads its logs reads ours.

    What a result doesn't hold is left out: questions, the texts of choices, and whether a choice is what the model
    would generate. `lengths` (characters of the choices) is ours, and `chai_eval` in the results: method and costs.

    Parameters
    ----------
    folder
        With `record.json` and `samples.parquet`.
    out
        Gets `<model>-<method>-<key>/results_<date>.json` and `samples_<task>_<date>.jsonl` beside it: the same whenever
        they are written.

    Returns
    -------
    Path
        The results' file.

    Raises
    ------
    RunError
        Where there is no finished result, or `out` can't be written.
    """
    record, samples = finished(folder), read_samples(folder)
    when = record["finished"].partition("+")[0].replace(":", "-")
    place = out / "-".join((record["model"], record["method"], record["key"]))
    lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in _lines(samples, list(record["metrics"])))
    results = place / f"results_{when}.json"
    try:
        write_whole(place / f"samples_{record['task']}_{when}.jsonl", lines)
        write_whole(results, json.dumps(_logged(record), indent=2, ensure_ascii=False))
    except OSError as error:
        raise RunError(f"out: {place} can't be written ({error.strerror or error})") from error
    return results


def _lines(samples: pd.DataFrame, metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines of lm-eval's log of samples, in its order: filter by filter."""
    kinds = dict.fromkeys(_split(each)[1] for each in metrics)
    for kind in kinds:
        names = [_split(each)[0] for each in metrics if _split(each)[1] == kind]
        rows = samples[samples["filter"] == kind] if "filter" in samples else samples
        for row in rows.to_dict("records"):
            line = {name: row[name] for name in ("doc_id", "doc_hash", "prompt_hash")}
            if (likelihoods := row.get("loglikelihoods")) is not None:
                answers: list[Any] = [[str(float(each))] for each in likelihoods]
                line |= {"resps": [[each] for each in answers], "lengths": [int(each) for each in row["lengths"]]}
            else:
                answers = [str(each) for each in row.get("responses", ())]
            parts = {name: json.loads(row[name]) if isinstance(row[name], str) else row[name] for name in names}
            yield line | {"filtered_resps": answers, "filter": kind, "metrics": names} | parts


def _split(metric: str) -> tuple[str, str]:
    """A metric's name and its filter, as lm-eval has them."""
    name, _, kind = metric.removesuffix(")").partition(" (")
    return name, kind or "none"


def _logged(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the layout of lm-eval's results."""
    task, n, config = record["task"], record["n_documents"], record["config"]
    scores: dict[str, Any] = {"name": task, "alias": task, "sample_len": n}
    for metric, each in record["metrics"].items():
        name, kind = _split(metric)
        scores[f"{name},{kind}"] = each["value"]
        scores[f"{name}_stderr,{kind}"] = "N/A" if each.get("stderr") is None else each["stderr"]
    name = f"{record['model']}-{record['method']}-{record['key']}"
    shots = config.get("num_fewshot")
    seeds = dict.fromkeys(("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"), config.get("seed"))
    return {
        "results": {task: scores},
        "group_subtasks": {},
        "configs": {task: {"task": task, **({} if shots is None else {"num_fewshot": shots})}},
        "versions": {},
        "n-shot": {} if shots is None else {task: shots},
        "higher_is_better": {},
        "n-samples": {task: {"effective": n}},
        "config": {
            "model": "chai_eval",
            "model_args": config["model"],
            "batch_size": None,
            "device": record.get("device"),
            "limit": config.get("limit"),
            **seeds,
        },
        "git_hash": (record.get("git") or {}).get("revision"),
        "date": datetime.fromisoformat(record["finished"]).timestamp(),
        "transformers_version": record["versions"]["transformers"],
        "lm_eval_version": record["versions"]["lm-eval"],
        "model_source": "chai_eval",
        "model_name": name,
        "model_name_sanitized": name,
        "system_instruction": config.get("system_instruction"),
        "fewshot_as_multiturn": config.get("fewshot_as_multiturn"),
        "total_evaluation_time_seconds": str(record["wall_seconds"]),
        "chai_eval": {each: record.get(each) for each in ("key", "method", "costs", "fidelity", "config")},
    }
