"""The command behind a record: what a user would type to get the same settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
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
    model, method = config["model"], config["method"]
    given = [*_model(model), *_method(method, model), f"task={task}", *_others(config, model)]
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


def _method(method: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    usual = _file("method", method["name"])
    yield f"method={method['name']}"
    for name, value in method.items():
        default = usual.get(name)
        if isinstance(default, str) and default.startswith("${model."):
            default = model.get(default[len("${model.") : -1])
        if value != default:
            yield f"method.{name}={_typed(value)}"


def _others(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    usual = {**defaults(Settings), "limit": model.get("default_limit")}
    for name, value in config.items():
        if name in usual and name not in UNSAID and value != usual[name]:
            yield f"{name}={_typed(value)}"


def _file(group: str, name: str) -> dict[str, Any]:
    path = conf_dir() / group / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _typed(value: Any) -> str:
    """A value as the command line reads it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":")).replace('"', "")
