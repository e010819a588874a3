from __future__ import annotations

import threading
from pathlib import Path

import pytest

from chai_eval.files import held, is_held, write_whole


@pytest.mark.parametrize("content", ["né", "né".encode(), lambda path: path.write_text("né", encoding="utf-8")])
def test_text_bytes_and_what_a_function_writes_become_the_file(content: object, tmp_path: Path) -> None:
    write_whole(tmp_path / "made" / "file", content)  # type: ignore[arg-type]
    assert (tmp_path / "made" / "file").read_text(encoding="utf-8") == "né"
    assert [each.name for each in (tmp_path / "made").iterdir()] == ["file"]


def test_a_write_that_fails_leaves_what_stood_there_and_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "before")

    def half(path: Path) -> None:
        path.write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", half)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "before")]


def refuse() -> None:
    raise AssertionError("taken")


def test_a_lock_that_is_taken_is_said_to_be_and_can_be_refused(tmp_path: Path) -> None:
    lock = tmp_path / "made" / "one.lock"
    assert not is_held(lock)
    with held(lock, refuse):
        assert is_held(lock)
        with pytest.raises(AssertionError, match="taken"), held(lock, refuse):
            pass
    assert not is_held(lock)


def test_a_lock_file_outlives_its_holder_so_that_all_who_wait_wait_for_the_same_file(tmp_path: Path) -> None:
    lock, entered = tmp_path / "one.lock", threading.Event()
    order: list[str] = []

    def second() -> None:
        with held(lock, entered.set):
            order.append("second")

    with held(lock, refuse):
        inode = lock.stat().st_ino
        waiting = threading.Thread(target=second)
        waiting.start()
        assert entered.wait(20)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert lock.stat().st_ino == inode
