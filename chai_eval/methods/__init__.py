"""Methods: each a short file that says what it approximates, over the one implementation in `attention/`."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from chai_eval.errors import SettingError, closest
from chai_eval.methods.base import Method
from chai_eval.methods.composed import ComposedMethod
from chai_eval.schema import read

__all__ = ["METHODS", "Method", "build_method"]


def _methods(kind: type[Method]) -> Iterator[type[Method]]:
    """The classes below one that have a name of their own."""
    for each in kind.__subclasses__():
        if isinstance(vars(each).get("name"), str):
            yield each
        yield from _methods(each)


def _order(kind: type[Method]) -> tuple[bool, str]:
    """The baseline first, then by name."""
    return kind.name != "mha", kind.name


# Every module of this package is a method, or what methods share: a new file is a new method.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
METHODS: dict[str, type[Method]] = {each.name: each for each in sorted(_methods(Method), key=_order)}


def build_method(name: str, **settings: Any) -> Method:
    """Make a method by name.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    **settings
        Fields of the method's class. `with` names methods that are put in beside it, `["dejavu"]`, or with settings
        `[{"name": "dejavu", "sparsity": 0.1}]`: see `ComposedMethod`.

    Raises
    ------
    SettingError
        For an unknown method or setting, or a value that is not allowed.
    """
    if name not in METHODS:
        raise SettingError(f"method: {name!r} given; allowed: {', '.join(METHODS)}")
    beside = settings.pop("with", None)
    if beside:
        return ComposedMethod((build_method(name, **settings), *map(_beside, _listed(beside))))
    kind = METHODS[name]
    allowed = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in allowed:
            hint = closest(setting, allowed)
            raise SettingError(
                f"method.{setting}: no such setting of {name}{hint}; allowed: {', '.join(allowed) or 'none'}"
            )
    return read(kind, settings, "method.")


def _listed(beside: Any) -> list[Any]:
    if isinstance(beside, str | dict):
        return [beside]
    if not isinstance(beside, list | tuple):
        raise SettingError(f"method.with: {beside!r} given; allowed: methods, such as [dejavu]")
    return list(beside)


def _beside(given: Any) -> Method:
    """A method that is put in beside another, from its name or its settings."""
    if isinstance(given, str):
        return build_method(given)
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise SettingError(f"method.with: {given!r} given; allowed: methods, such as [dejavu] or [{{name: dejavu}}]")
    return build_method(**given)
