"""Frozen dataclasses as JSON values, and back."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def to_json(value: Any) -> Any:
    """JSON values of dataclasses, mappings and sequences, without fields that may be left out and are None or empty."""
    if is_dataclass(value):
        found = {each.name: getattr(value, each.name) for each in fields(value)}
        needed = {each.name for each in fields(value) if _needed(each)}
        return {name: to_json(each) for name, each in found.items() if name in needed or each not in (None, {}, [])}
    if isinstance(value, dict):
        return {str(name): to_json(each) for name, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, list | tuple) else value


def from_json(kind: Any, value: Any) -> Any:
    """What `to_json` made `value` of; fields that the dataclass doesn't have are passed over.

    Parameters
    ----------
    kind : type
        A dataclass, a list, tuple or dict of one kind, an alternative of several, or what JSON has itself.

    Raises
    ------
    AttributeError, TypeError, ValueError
        For values that are not of this kind.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        types = _types(kind)
        return kind(**{name: from_json(types[name], each) for name, each in value.items() if name in types})
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return from_json(next((each for each in of if _fits(each, value)), None), value)
    if origin in (list, tuple):
        return origin(from_json(of[0], each) for each in value)
    return {of[0](name): from_json(of[1], each) for name, each in value.items()} if origin is dict else value


@lru_cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _needed(field: Field[Any]) -> bool:
    return field.default is field.default_factory is MISSING


def _fits(kind: Any, value: Any) -> bool:
    if is_dataclass(kind):
        return isinstance(value, dict) and all(each.name in value for each in fields(kind) if _needed(each))
    return (kind is NoneType) == (value is None)
