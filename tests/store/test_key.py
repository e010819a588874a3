from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from chai_eval.store.key import result_key

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
