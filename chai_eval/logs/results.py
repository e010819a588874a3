"""Our own results (`record.json`, `samples.parquet`) as logs; lm-eval's logs of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from chai_eval.errors import RunError
from chai_eval.logs.documents import texts_of
from chai_eval.logs.log import Found, TaskLog
from chai_eval.store.folder import SET_ASIDE
from chai_eval.store.record import RECORD, read_record, read_samples


def find(folder: Path) -> Iterator[Found]:
    """Every finished result in a folder and below it, but for those set aside; raises as `read_record` does."""
    for place in (path.parent for path in sorted(folder.rglob(RECORD))):
        if SET_ASIDE not in place.name:
            record = finished(place)
            if "kind" not in record:  # one of another kind than results
                yield Found(record["task"], _settings(record), record["finished"], place, partial(read, place))


def read(folder: Path) -> TaskLog:
    """Read a finished result; raises as `read_record` does."""
    record, samples = finished(folder), read_samples(folder)
    texts = lru_cache(maxsize=1)(partial(texts_of, record))
    metrics = {name: float(each["value"]) for name, each in record["metrics"].items()}
    samples = samples.rename(columns={"responses": "response"})
    if "response" in samples:
        samples["response"] = [str(each[0]) if len(each) else "" for each in samples["response"]]
    return TaskLog(record["task"], f"{record['method']} on {record['model']}", metrics, samples, texts=texts)


def finished(folder: Path) -> dict[str, Any]:
    """The record of a finished result, with all that tells where it comes from; raises as `read_record` does."""
    record = read_record(folder)
    if record is None:
        raise RunError(f"{folder}: no finished result")
    if "kind" not in record:
        missing = [name for name in ("model", "task", "method", "key", "config", "finished") if name not in record]
        if missing:
            raise RunError(f"{folder / RECORD}: lacks {', '.join(missing)}")
    return record


def _settings(record: dict[str, Any]) -> str:
    """What was run: results that share it differ by the code that made them."""
    parts = record.get("key_parts", {})
    told = {name: parts.get(name) for name in ("model", "method", "limit", "seed", "scoring")}
    return f"{record['method']} {json.dumps(told)}"
