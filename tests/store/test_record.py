from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from chai_eval.errors import RunError
from chai_eval.store import LAYOUT, read_fidelity, read_record, read_samples, write_fidelity, write_record

SAMPLES = pd.DataFrame(
    {"doc_id": [0, 1], "loglikelihoods": [[-1.25, -1 / 3], [-2.0]], "lengths": [[3, 4], [1]], "acc": [1.0, 0.0]}
)


def test_a_record_and_its_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    record = {"n_documents": 2, "metrics": {"acc": {"value": 0.1 + 0.2, "stderr": None}}}
    write_record(tmp_path / "result", record, SAMPLES)
    assert read_record(tmp_path / "result") == {"layout": LAYOUT, **record}
    read = read_samples(tmp_path / "result")
    assert [list(row) for row in read["loglikelihoods"]] == SAMPLES["loglikelihoods"].tolist()
    assert read["acc"].tolist() == [1.0, 0.0]


def test_a_result_folder_holds_nothing_but_the_two_files(tmp_path: Path) -> None:
    write_record(tmp_path, {}, SAMPLES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "samples.parquet"]


def test_where_samples_cannot_be_written_there_is_no_record_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: pd.DataFrame, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full_disk)
    with pytest.raises(RunError, match=r"^results_dir: .*No space left on device$"):
        write_record(tmp_path, {}, SAMPLES)
    assert list(tmp_path.iterdir()) == []


def test_no_record_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "nothing") is None


@pytest.mark.parametrize("text", [json.dumps({"layout": LAYOUT + 1}), "{}", "[]"])
def test_a_record_of_another_layout_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RunError, match=rf"record\.json: written in layout \w+, this version reads layout {LAYOUT};"):
        read_record(tmp_path)


def test_a_record_that_is_not_json_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"layout": 1')
    with pytest.raises(RunError, match=r"record\.json: not a readable record"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({}, "n_documents is missing"),
        ({"n_documents": "2"}, "n_documents is '2', not a count"),
        ({"n_documents": 2}, "metrics is missing"),
        ({"n_documents": 2, "metrics": {}}, "metrics is {}"),
        ({"n_documents": 2, "metrics": None}, "metrics is None"),
        ({"n_documents": 2, "metrics": {"acc": None}}, "metrics: acc is None"),
        ({"n_documents": 2, "metrics": {"acc": {"value": None}}}, "metrics: acc is {'value': None}"),
    ],
    ids=str,
)
def test_a_record_without_its_numbers_is_refused_by_name(tmp_path: Path, field: dict[str, object], said: str) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"layout": LAYOUT, **field}))
    with pytest.raises(RunError, match=rf"record\.json: not a readable record \({re.escape(said)}"):
        read_record(tmp_path)


def test_fidelity_is_added_to_a_record_that_stays_what_it_was(tmp_path: Path) -> None:
    record = {"n_documents": 2, "metrics": {"acc": {"value": 0.5, "stderr": None}}}
    write_record(tmp_path, record, SAMPLES)
    close = {"asked": 3, "documents": 2, "divergence": {"value": 0.1 + 0.2, "low": None, "high": None}}
    write_fidelity(tmp_path, close, SAMPLES[["doc_id"]])
    assert read_record(tmp_path) == {"layout": LAYOUT, **record, "fidelity": close}
    for asked in (3, 2):
        found = read_fidelity(tmp_path, asked)
        assert found is not None
        pd.testing.assert_frame_equal(found, SAMPLES[["doc_id"]])
    assert read_fidelity(tmp_path, 4) is None
    assert read_samples(tmp_path)["acc"].tolist() == [1.0, 0.0]


def test_without_a_finished_result_there_is_no_fidelity_to_read_or_add(tmp_path: Path) -> None:
    assert read_fidelity(tmp_path, 3) is None
    with pytest.raises(RunError, match=r"record\.json: it is missing"):
        write_fidelity(tmp_path, {"asked": 3, "documents": 2}, SAMPLES)
    assert list(tmp_path.iterdir()) == []


def test_fidelity_with_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    write_record(tmp_path, {"n_documents": 2, "metrics": {"acc": {"value": 0.5}}}, SAMPLES)
    with pytest.raises(ValueError, match="JSON"):
        write_fidelity(tmp_path, {"asked": 2, "documents": 2, "perplexity": float("nan")}, SAMPLES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "samples.parquet"]
