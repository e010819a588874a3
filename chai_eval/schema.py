"""A setting stated once, as a field of a pydantic dataclass: from it come its check, its help, and what records keep.

A field whose type is another class of settings groups settings for readers of the code only: users type them, and
records keep them, beside the others. Groups that users type as `model.dtype` have a reader (`group`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from chai_eval.errors import SettingError, unknown, wrong

S = TypeVar("S")

# Fields may have other names in Python than users type; a check is built when it is first needed, for a fast start.
SETTINGS = ConfigDict(populate_by_name=True, defer_build=True)


def setting(
    default: Any,
    says: str,
    *,
    allowed: str | None = None,
    typed: str | None = None,
    composed: Any = ...,
) -> Any:
    """A field of a class of settings, with its default and what `--help` says about it.

    Parameters
    ----------
    allowed
        What an error says is allowed, where the type doesn't say it well.
    typed
        Its name on the command line and in records, where it isn't that of the field.
    composed
        The default on the command line, where it comes from another setting (`${…}`) or has a word of its own.
    """
    extra: dict[str, Any] = {} if allowed is None else {"allowed": allowed}
    if composed is not ...:
        extra["composed"] = composed
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return Field(**given, description=says, validation_alias=typed, json_schema_extra=extra)


def as_text(value: Any) -> Any:
    # A revision or a folder may look like a number.
    return str(value) if isinstance(value, int | float | Path) and not isinstance(value, bool) else value


def _as_folder(value: Any) -> Any:
    text = as_text(value)
    return Path(text).expanduser() if isinstance(text, str) and text else text


Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, BeforeValidator(as_text), Field(strict=True, min_length=1)]
Folder = Annotated[Path, BeforeValidator(_as_folder), Field(strict=True)]
Group = Annotated[Mapping[str, Any], BeforeValidator(lambda value: {} if value is None else value)]

# Running text of calibrations and comparisons.
TEXTS = (
    "c4 (from the hub), passages (SQuAD and SciQ, no hub), auto (c4 where the hub answers), stdlib (Python's sources), "
    "kmmlu (Korean, from lm-eval), chat (the tasks' questions and answers, by the model's chat template), or a file: "
    "plain text, JSON lines"
)


def group(read_values: Callable[[Mapping[str, Any]], Any]) -> BeforeValidator:
    """The reader of settings that are typed after a name and a dot."""
    return BeforeValidator(lambda value: read_values(value) if isinstance(value, Mapping) else value)


def read(kind: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Settings of values by the names users type, after a prefix (`model.`); SettingError for the first mistake."""
    known = [name for name, _, _ in _fields(kind, flat=True)]
    for name in values:
        if name not in known:
            raise unknown(f"{prefix}{name}", str(name), known)
    return _made(kind, values, prefix)


def entries(kind: type[Any]) -> dict[str, tuple[Any, str]]:
    """Each setting that has a default, with it (as a plain JSON value) and what it is for."""
    found = {}
    for typed, _, info in _fields(kind, flat=True):
        if info.description and not info.is_required():
            default = _extra(info).get("composed", info.get_default(call_default_factory=True))
            found[typed] = (to_jsonable_python(default), info.description)
    return found


def defaults(kind: type[Any]) -> dict[str, Any]:
    """The values that a configuration starts with."""
    return {name: default for name, (default, _) in entries(kind).items()}


@dataclass(frozen=True, config=SETTINGS)
class Recorded:
    """Settings that records keep, but for those `left_out`."""

    left_out: ClassVar[tuple[str, ...]] = ()

    def as_config(self) -> dict[str, Any]:
        """As plain JSON values under the names that users type."""
        found: dict[str, Any] = {}
        for typed, name, info in _fields(type(self)):
            value = getattr(self, name)
            if _flat(info) is not None:
                found |= value.as_config()
            elif name not in self.left_out:
                found[typed] = value.as_config() if hasattr(value, "as_config") else to_jsonable_python(value)
        return found


def _made(kind: type[S], values: Mapping[str, Any], prefix: str) -> S:
    given = {}
    for typed, name, info in _fields(kind):
        inner = _flat(info)
        if inner is not None:
            given[name] = _made(inner, values, prefix)
        elif typed in values:
            given[name] = values[typed]
    try:
        return kind(**given)
    except ValidationError as error:
        raise _mistake(kind, error, values, prefix) from error


def _fields(kind: type[Any], *, flat: bool = False) -> Iterator[tuple[str, str, FieldInfo]]:
    """Fields as (name users type, name in Python, all about it); `flat` goes into groups that users don't type."""
    for name, info in kind.__pydantic_fields__.items():
        inner = _flat(info) if flat else None
        if inner is not None:
            yield from _fields(inner, flat=True)
        else:
            yield (info.validation_alias if isinstance(info.validation_alias, str) else name), name, info


def _flat(info: FieldInfo) -> type[Any] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and is_pydantic_dataclass(kind) and not info.metadata else None


def _extra(info: FieldInfo) -> Mapping[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _mistake(kind: type[Any], error: ValidationError, values: Mapping[str, Any], prefix: str) -> SettingError:
    """One line about the first mistake, in the user's words."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SettingError):
        return cause
    name = str(first["loc"][0])
    typed, info = next((typed, info) for typed, field, info in _fields(kind) if name in (typed, field))
    if typed not in values:
        return SettingError(f"{prefix}{typed}: missing; allowed: a value")
    allowed = _extra(info).get("allowed")
    if allowed is not None:
        return wrong(prefix + typed, values[typed], allowed)
    # Of a list, the number that is wrong.
    given = first["input"] if isinstance(first["loc"][-1], int) else values[typed]
    schema = TypeAdapter(kind).json_schema()["properties"][typed]
    return wrong(prefix + typed, given, _allowed(schema))


def _allowed(schema: Mapping[str, Any]) -> str:
    """Say what a JSON schema allows."""
    if "anyOf" in schema:
        first = schema["anyOf"][0]
        return _allowed(first) + {"integer": ", or null", "boolean": ", null"}.get(first.get("type"), " or null")
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum") or [schema["const"]]))
    if schema.get("type") == "integer":
        least, most = schema["minimum"], schema.get("maximum")
        return f"a whole number from {least} " + ("up" if most is None else f"to {most}")
    if schema.get("type") == "array":
        return f"whole numbers from {schema['items']['minimum']} to {schema['items']['maximum']}, as [512,1024]"
    return {"boolean": "true, false", "string": "a text"}.get(str(schema.get("type")), "a group of settings")
