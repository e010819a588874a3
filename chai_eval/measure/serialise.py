"""Frozen dataclasses as JSON values, and back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # here, so that a machine without it can time what it doesn't read back

    return TypeAdapter(kind)


def to_json(value: Any, kind: Any = None) -> Any:
    """JSON values of a dataclass (or of `kind`, of dataclasses), without fields that have their default."""
    kind = type(value) if kind is None else kind
    return _adapter(kind).dump_python(value, mode="json", exclude_defaults=True)


def from_json(kind: Any, value: Any) -> Any:
    """What `to_json` made `value` of; fields that the dataclass doesn't have are passed over, ValueError for others."""
    return _adapter(kind).validate_python(value)
