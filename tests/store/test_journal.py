from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chai_eval.errors import RunError
from chai_eval.store.journal import Journal

SCORED = [(f"request-{index}", [-(1 / 3) * index, index % 2 == 0]) for index in range(20)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "result" / "journal.jsonl"


def filled(path: Path) -> bytes:
    with Journal(path) as journal:
        journal.append_many(SCORED[:12])
        journal.append_many(SCORED[12:])
    return path.read_bytes()


def test_a_journal_gives_back_every_payload_to_the_last_bit(path: Path) -> None:
    filled(path)
    with Journal(path) as journal:
        assert {key: journal.get(key) for key, _ in SCORED} == dict(SCORED)
        assert journal.get("request-20") is None
        assert len(journal) == 20


def test_texts_with_line_breaks_and_any_alphabet_are_payloads_too(path: Path) -> None:
    text = 'a\nb\r\n"c" \u2028 日本 \x00'
    with Journal(path) as journal:
        journal.append_many([("generated", text)])
    assert Journal(path).get("generated") == text


def test_opening_a_journal_writes_nothing(path: Path) -> None:
    with Journal(path) as journal:
        journal.append_many([])
    assert not path.parent.exists()


def test_a_journal_torn_at_any_byte_keeps_all_whole_lines_and_goes_on(path: Path) -> None:
    content = filled(path)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = content[:length].count(b"\n")
        with Journal(path) as journal:
            assert len(journal) == whole
            journal.append_many(SCORED[whole:])
        assert path.read_bytes() == content


def test_a_corrupt_line_is_named_by_number_and_its_request_counts_as_not_scored(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = filled(path).splitlines(keepends=True)
    lines[6] = lines[6].replace(b'"scored":[-2.0,', b'"scored":[-3.0,')
    lines[9] = b"\x00\xff garbage\n"
    path.write_bytes(b"".join(lines))
    journal = Journal(path)
    assert [key for key, _ in SCORED if journal.get(key) is None] == ["request-6", "request-9"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "line 7 " in said[0]
    assert "line 10 " in said[1]


def test_a_request_scored_again_after_corruption_is_found(path: Path) -> None:
    lines = filled(path).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[4:]]))
    with Journal(path) as journal:
        journal.append_many([SCORED[3]])
    assert Journal(path).get("request-3") == SCORED[3][1]


def test_what_was_appended_survives_sigkill(path: Path) -> None:
    program = (
        "import os, signal, sys; from chai_eval.store.journal import Journal\n"
        "journal = Journal(sys.argv[1]); journal.append_many([('a', [-1.5, True])])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=False, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    assert Journal(path).get("a") == [-1.5, True]


def test_a_journal_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "result").write_text("a file where the folder should be")
    with pytest.raises(RunError, match=r"^results_dir: .*can't be written: [^\n]+$"):
        Journal(tmp_path / "result" / "journal.jsonl").append_many(SCORED)


def test_a_directory_in_place_of_the_journal_is_one_line(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(RunError, match=r"^results_dir: .*journal\.jsonl can't be read: [^\n]+$"):
        Journal(path)


@pytest.mark.parametrize("key", [None, 7, ["request-0"], {"request": 0}], ids=repr)
def test_a_line_whose_checksum_is_right_but_whose_request_is_no_text_is_corrupt(
    path: Path, key: object, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    check = hashlib.sha256(json.dumps([key, 1], separators=(",", ":")).encode()).hexdigest()[:16]
    path.write_text(json.dumps({"request": key, "scored": 1, "check": check}) + "\n")
    assert len(Journal(path)) == 0
    assert "line 1 is corrupt" in caplog.text
