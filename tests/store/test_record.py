from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from chai_eval.checksum import DamagedError
from chai_eval.errors import RunError
from chai_eval.store.record import LAYOUT, read_fidelity, read_record, read_samples, write_fidelity, write_record

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


def on_disk(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


def test_a_record_names_the_sha256_of_each_of_its_files(tmp_path: Path) -> None:
    write_record(tmp_path, {"n_documents": 2, "metrics": {"acc": {"value": 0.5}}}, SAMPLES)
    write_fidelity(tmp_path, {"asked": 2, "documents": 2}, SAMPLES)
    names = ("samples.parquet", "fidelity.parquet")
    assert on_disk(tmp_path)["files"] == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names
    }


def test_a_record_laid_out_anew_is_the_same_and_one_with_another_number_is_not(tmp_path: Path) -> None:
    write_record(tmp_path, {"n_documents": 2, "metrics": {"acc": {"value": 0.5}}, "by": {10: "a", 9: "b"}}, SAMPLES)
    whole, read = on_disk(tmp_path), read_record(tmp_path)
    (tmp_path / "record.json").write_text(json.dumps(dict(reversed(whole.items()))))
    assert read_record(tmp_path) == read
    whole["metrics"]["acc"]["value"] = 0.25
    (tmp_path / "record.json").write_text(json.dumps(whole))
    with pytest.raises(DamagedError, match=r"record\.json: not a readable record \(not what was written"):
        read_record(tmp_path)


@pytest.mark.parametrize("lost", ["files", "checksum"])
def test_a_record_that_has_lost_one_of_its_checksums_is_damaged_rather_than_old(tmp_path: Path, lost: str) -> None:
    write_record(tmp_path, {"n_documents": 2, "metrics": {"acc": {"value": 0.5}}}, SAMPLES)
    whole = {name: value for name, value in on_disk(tmp_path).items() if name != lost}
    (tmp_path / "record.json").write_text(json.dumps(whole))
    with pytest.raises(DamagedError):
        read_record(tmp_path)


def test_what_could_not_be_checked_gets_no_checksum_by_adding_to_it(tmp_path: Path) -> None:
    write_record(tmp_path, {"n_documents": 2, "metrics": {"acc": {"value": 0.5}}}, SAMPLES)
    (tmp_path / "record.json").write_text(json.dumps(read_record(tmp_path)))
    write_fidelity(tmp_path, {"asked": 2, "documents": 2}, SAMPLES)
    assert on_disk(tmp_path).keys() == {"layout", "n_documents", "metrics", "fidelity"}
    assert read_fidelity(tmp_path, 2) is not None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"layout": 1, "n_documents": ' + "9" * 5000 + "}", "\udcff"], ids=len)
def test_json_that_breaks_the_parser_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DamagedError, match=r"^.*record\.json: not a readable record \([^\n]+$"):
        read_record(tmp_path)
