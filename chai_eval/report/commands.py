"""The command behind a record: what a user would type to get the same settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from chai_eval.measure_settings import MeasureSettings
from chai_eval.resources import conf_dir
from chai_eval.schema import defaults
from chai_eval.settings import ModelSettings, Settings

# Where a run wrote to, and how much it did at once: no part of what it found.
UNSAID = ("results_dir", "batch_tokens", "measure", "model", "method", "task")


def command_of(config: Mapping[str, Any], task: str) -> str:
    """`python -m chai_eval …` with the settings of a run, as its record keeps them, that aren't the usual ones."""
    model = config["model"]
    given = [*_model(model), *_method(config), f"task={task}", *_others(config, model)]
    return shlex.join(["python", "-m", "chai_eval", *given])


def measure_command(record: Mapping[str, Any]) -> str:
    """`python -m chai_eval measure …` of a measurement: its methods by name, its grid where it isn't the usual one."""
    config = record["config"]
    methods = [each["method"] for each in record["contenders"] if not each.get("attention")]
    usual = {**defaults(MeasureSettings), "kind": "full", "rivals": None}
    given = [f"method={','.join(dict.fromkeys(methods))}"] if methods else []
    if config["measure"]["kind"] != usual["kind"]:
        given.append(f"measure={config['measure']['kind']}")
    given += [
        f"measure.{name}={_typed(value)}"
        for name, value in config["measure"].items()
        if name != "kind" and value != usual[name]
    ]
    return shlex.join(["python", "-m", "chai_eval", "measure", *_model(config["model"]), *given])


def _model(model: Mapping[str, Any]) -> Iterator[str]:
    usual = {**defaults(ModelSettings), **_file("model", model["name"])}
    if "name" in usual:
        yield f"model={model['name']}"
    else:
        yield f"model.name={model['name']}"
    for name, value in model.items():
        if name in usual and value != usual[name]:
            yield f"model.{name}={_typed(value)}"


def unusual(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run's method that its file in `conf/method` doesn't give."""
    method, model = config["method"], config["model"]
    usual, found = _file("method", method["name"]), {}
    for name, value in method.items():
        default = usual.get(name)
        if isinstance(default, str) and default.startswith("${model."):
            default = model.get(default[len("${model.") : -1])
        if name != "name" and value != default:
            found[name] = value
    return found


def _method(config: Mapping[str, Any]) -> Iterator[str]:
    yield f"method={config['method']['name']}"
    yield from (f"method.{name}={_typed(value)}" for name, value in unusual(config).items())


def _others(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    usual = {**defaults(Settings), "limit": model.get("default_limit")}
    for name, value in config.items():
        if name in usual and name not in UNSAID and value != usual[name]:
            yield f"{name}={_typed(value)}"


@cache
def _file(group: str, name: str) -> dict[str, Any]:
    path = conf_dir() / group / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _typed(value: Any) -> str:
    """A value as the command line reads it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":")).replace('"', "")
