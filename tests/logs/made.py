"""Logs as stock lm-eval leaves them, of a tiny random model on tasks of one's own."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from chai_eval import build_method, load_model
from chai_eval.methods import Method

MODEL = "tiny_llama_random"
TASKS = ("own_choice", "own_text", "own_rolling")


def method() -> Method:
    return build_method("chai", clusters=[[2, 4]], probe_tokens=3)


def stock_log(out: Path, tasks: Path, under: Method | None = None, **given: Any) -> Path:
    """Score the own tasks and log them as `lm_eval --log_samples --output_path` does; return the folder of the logs."""
    model, tokenizer = load_model(MODEL, device="cpu", dtype="float32")
    tracker = EvaluationTracker(output_path=str(out))
    with nullcontext() if under is None else under.applied(model):
        results = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4),
            model_args={"pretrained": f"org/{MODEL}"},
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            evaluation_tracker=tracker,
            bootstrap_iters=0,
            **{"tasks": list(TASKS), **given},
        )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    return out


def lines(folder: Path, task: str) -> list[dict[str, Any]]:
    """Lines of the one log of a task."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rewrite(folder: Path, task: str, rows: list[dict[str, Any]]) -> Path:
    """Put other lines into the one log of a task."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
