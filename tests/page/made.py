"""Records as runs leave them, of numbers that a test chooses, and documents whose texts would harm a careless page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from chai_eval.checksum import write_document
from chai_eval.store.record import write_fidelity, write_record

HARMFUL = "<script>alert('x')</script> & \"quotes\""


def documents(folder: Path, count: int = 60) -> list[dict[str, Any]]:
    """PIQA's columns, as `data_dir` has them: the first choice is right in every other document."""
    rows = [
        {"goal": f"{HARMFUL} goal {at}", "sol1": f"one {at}", "sol2": f"two <b>{at}</b>", "label": at % 2}
        for at in range(count)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "piqa.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return rows


def hash_of(row: dict[str, Any]) -> str:
    """lm-eval's name for a document."""
    return hashlib.sha256(json.dumps(row, indent=2, ensure_ascii=False).encode()).hexdigest()


def result(
    results: Path,
    method: str,
    right: Sequence[bool],
    *,
    task: str = "piqa",
    rows: Sequence[dict[str, Any]] | None = None,
    divergence: Sequence[float] | None = None,
    held: float | None = None,
    model: str = "tiny",
    paper: str | None = None,
    settings: dict[str, Any] | None = None,
    data_dir: Path | None = None,
    finished: str = "2026-01-01T00:00:00+00:00",
) -> Path:
    """Write a result of which each document is right or wrong as told; return its folder."""
    count = len(right)
    labels = [int(rows[at]["label"]) if rows else at % 2 for at in range(count)]
    chosen = [label if ok else 1 - label for label, ok in zip(labels, right, strict=True)]
    scored = [[-1.0, -2.0] if choice == 0 else [-2.0, -1.0] for choice in chosen]
    acc = [float(ok) for ok in right]
    samples = pd.DataFrame(
        {
            "doc_id": range(count),
            "doc_hash": [hash_of(rows[at]) if rows else f"{task} {at}" for at in range(count)],
            "prompt_hash": "p",
            "loglikelihoods": scored,
            "lengths": [[5, 5]] * count,
            "acc": acc,
            "acc_norm": acc,
        }
    )
    settings = settings or {}
    key = hashlib.sha256(json.dumps([method, task, settings, finished]).encode()).hexdigest()[:12]
    config = {
        "model": {"name": model, "path": None, "paper": paper, "clusters": None},
        "method": {"name": method, **settings},
        "task": task, "source": "auto", "data_dir": None if data_dir is None else str(data_dir),
        "limit": count, "fidelity": 25, "seed": 1234, "scoring": "packed", "include_path": None,
    }  # fmt: skip
    record = {
        "model": model, "task": task, "method": method, "key": key, "n_documents": count,
        "metrics": {name: {"value": float(np.mean(acc)), "stderr": None} for name in ("acc", "acc_norm")},
        "costs": {"of_mha": {"held": held or 1.0, "read": held or 1.0}, "simulated": held is None},
        "config": config,
        "key_parts": {
            "model": {"fingerprint": "f", "dtype": "float32"}, "method": {"name": method, **settings},
            "task": {"name": task, "config": "c", "prompts": "p"}, "seed": 1234, "versions": {}, "code": "c",
        },
        "finished": finished, "git": {"revision": "0123456789abcdef", "dirty": False}, "machine": {"cpu": "a cpu"},
    }  # fmt: skip
    folder = results / model / task / f"{method}-{key}"
    write_record(folder, record, samples)
    if divergence is not None:
        _compare(folder, divergence)
    return folder


def _compare(folder: Path, divergence: Sequence[float]) -> None:
    close = pd.DataFrame({"doc_id": range(len(divergence)), "tokens": 10, "divergence": divergence, "agreement": 0.75})
    found = {
        "asked": len(close), "documents": len(close), "tokens": int(close["tokens"].sum()),
        "divergence": {"value": float(np.mean(divergence)), "low": 0.0, "high": 1.0},
        "agreement": {"value": 0.75, "low": 0.0, "high": 1.0}, "perplexity": 1.0, "baseline_perplexity": 1.0,
    }  # fmt: skip
    write_fidelity(folder, found, close)


def frontier(folder: Path, model: str, losses: dict[str, tuple[float, Sequence[float]]]) -> None:
    """Write a frontier of methods, each with the share it saves and its divergence by sequence."""
    points, samples = [], []
    for method, (saved, divergence) in losses.items():
        values = np.asarray(divergence, float)
        points.append(
            {
                "method": method, "point": f"{method} 1", "held": 1 - saved, "read": 1 - saved, "kl": values.mean(),
                "kl_low": values.min(), "kl_high": values.max(), "same_token": 0.8, "sequences": len(values),
                "tokens": 10, "dominated": False, "settings": json.dumps({"name": method, "note": HARMFUL}),
            }
        )  # fmt: skip
        samples.append(pd.DataFrame({"point": f"{method} 1", "divergence": values}))
    folder.mkdir(parents=True)
    pd.concat(samples).to_parquet(folder / "samples.parquet", index=False)
    described = {
        "model": {"name": model}, "text": "a text", "settings": {"tokens": 16}, "points": points,
        "command": "python -m chai_eval frontier",
    }  # fmt: skip
    write_document(folder / "frontier.json", described, files=None)
