"""The records that are published: every one of them is on the page, which is small and the same when made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chai_eval.cli import main

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "records"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("one"))


def made(place: Path) -> Path:
    """A report of what is published, made in a folder with nothing but a link to it: paths in it name no machine."""
    (place / "results").symlink_to(ROOT / "results")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        assert main(["report", "results_dir=results/records", "out=out"]) == 0
    return place / "out"


def test_the_page_is_under_a_megabyte_and_leaves_nothing_out(out: Path) -> None:
    text = (out / "index.html").read_text()
    assert len(text.encode()) < 1_000_000
    assert "Left out" not in text
    assert str(ROOT) not in text
    for path in RECORDS.rglob("*.json"):
        record = path if path.name not in ("frontier.json", "record.json") else path.parent
        assert str(record.relative_to(ROOT)) in text


def test_it_is_rebuilt_to_the_byte(out: Path, tmp_path: Path) -> None:
    again = made(tmp_path)
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert [path for path in files if (out / path).read_bytes() != (again / path).read_bytes()] == []


def test_points_of_the_frontier_are_those_of_its_record(out: Path) -> None:
    content = json.loads((RECORDS / "frontier" / "smollm2_mha-256" / "frontier.json").read_text())
    point = next(each for each in content["points"] if each["point"] == "chai 2")
    lines = [each.split("|")[1:6] for each in (out / "tables" / "frontier.md").read_text().splitlines() if "|" in each]
    cells = ["smollm2_mha", "chai", "256", f"{100 * point['held']:.1f}", f"{100 * point['read']:.1f}"]
    assert cells in [[cell.strip() for cell in line] for line in lines]
    assert f"chai saves 14 % at KL {point['kl']:.3g} nats per token" in (out / "index.html").read_text()
