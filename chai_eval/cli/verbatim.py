"""Values that are taken as they are typed: folders and files may have any characters in their names."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

_SEVERAL = re.compile(r"""\s*('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,]*?)\s*(?:,|$)""", flags=re.DOTALL)


def verbatim(typed: str) -> str:
    r"""The value of an override that is read as the text typed, whatever `\`, `'` or `${…}` it has.

    A pair of quotes around it is taken off, and `null` stays what it is.
    """
    if typed == "null":
        return typed
    # To OmegaConf `\${` is `${`, and backslashes before it come in pairs; elsewhere they are themselves.
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", _unquoted(typed))
    return QuotedString(text, Quote.single).with_quotes()


def several(typed: str) -> list[str]:
    """The values of a sweep, each as it was typed: what commas that stand in no quotes separate."""
    whole = re.fullmatch(r"choice\((.*)\)", typed, flags=re.DOTALL)
    values = whole[1] if whole else typed
    found = [match[1] for match in _SEVERAL.finditer(values)]
    # At its end the pattern matches once more, with nothing, unless a comma stands there.
    return found if values.rstrip().endswith(",") else found[:-1]


def as_typed(override: str) -> str:
    """An override whose value `verbatim` made, as a user would type it."""
    key, _, value = override.partition("=")
    if value == "null":
        return override
    return f"{key}={OmegaConf.create({'value': _unquoted(value)})['value']}"


def _unquoted(value: str) -> str:
    if not value.startswith(("'", '"')):
        return value
    try:
        read = OverridesParser.create().parse_override(f"value={value}").value()
    except HydraException:
        return value
    return read if isinstance(read, str) else value
