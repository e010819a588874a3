from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from chai_eval.store import numeric_code_version, result_key

PARTS = {"model": {"source": "m", "fingerprint": "f"}, "limit": None, "method": {"clusters": [[9, 17], [3, 13]]}}


def test_the_key_is_the_start_of_a_sha256_over_canonical_json() -> None:
    text = b'{"a":[1,2.5,null],"b":"\\u00e9"}'
    assert result_key({"b": "é", "a": [1, 2.5, None]}) == hashlib.sha256(text).hexdigest()[:12]


def test_the_key_does_not_depend_on_the_order_of_parts() -> None:
    assert result_key(dict(reversed(PARTS.items()))) == result_key(PARTS)


@pytest.mark.parametrize(
    "change", [{"limit": 100}, {"method": {"clusters": [[9, 16], [3, 14]]}}, {"model": {"source": "m"}}]
)
def test_any_changed_part_changes_the_key(change: dict[str, object]) -> None:
    assert result_key({**PARTS, **change}) != result_key(PARTS)


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}, Path("a")])
def test_a_part_that_json_cannot_hold_exactly_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        result_key({"part": value})


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for part in ("attention", "methods", "scoring", "report"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "code.py").write_text('"""What it is."""\ndef double(x):\n    return 2 * x\n')
    return tmp_path


@pytest.mark.parametrize("part", ["attention", "methods", "scoring"])
def test_a_changed_number_in_the_code_changes_its_version(package: Path, part: str) -> None:
    before = numeric_code_version(package)
    (package / part / "code.py").write_text('"""What it is."""\ndef double(x):\n    return 3 * x\n')
    assert numeric_code_version(package) != before


def test_docstrings_comments_and_layout_do_not_change_the_version(package: Path) -> None:
    before = numeric_code_version(package)
    (package / "attention" / "code.py").write_text(
        '"""Else."""\n\n\ndef double(\n    x,\n):\n    """Twice."""\n    return 2 * x  # twice\n'
    )
    assert numeric_code_version(package) == before


def test_code_that_makes_no_numbers_does_not_change_the_version(package: Path) -> None:
    before = numeric_code_version(package)
    (package / "report" / "code.py").write_text("x = 1\n")
    assert numeric_code_version(package) == before


@pytest.mark.parametrize("name", ["other.py", "kernels/attend.cu"])
def test_a_new_file_changes_the_version(package: Path, name: str) -> None:
    before = numeric_code_version(package)
    path = package / "attention" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert numeric_code_version(package) != before
