"""Every record that a report was made from: its settings, where it comes from, and the command that made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chai_eval.report.columns import Column, Table
from chai_eval.report.commands import command_of, measure_command
from chai_eval.report.records import Records, Stored, TaskResult
from chai_eval.report.rows import brief
from chai_eval.resources import conf_dir
from chai_eval.task_settings import told

NOT_KEPT = "python -m chai_eval benchmark {} (its options are not in the record)"


def record_table(records: Records) -> Table:
    """One line a record."""
    lines = [_task_line(each) for each in sorted(records.tasks, key=lambda each: (*each.place, each.record["key"]))]
    for each in records.frontiers:
        content = each.content
        lines.append(_line(each, "frontier", content["model"]["name"], content["settings"], content["command"]))
    for each in records.analyses:
        made = each.content["provenance"]
        lines.append(_line(each, "analysis", each.content["model"]["name"], made["settings"], made["command"]))
    for each in records.measurements:
        config = each.content["config"]
        lines.append(_line(each, "measure", config["model"]["name"], config["measure"], measure_command(each.content)))
    for each in records.experiments:
        content = each.content
        about = {name: content[name] for name in ("title", "quick") if name in content}
        kind = f"experiment {content['experiment']}"
        lines.append(_line(each, kind, content["model"]["name"], about, content["command"]))
    for each in records.benchmarks:
        # A comparison on text has no rows, and is called by what it was made of; its folder has the benchmark's name.
        name = each.content["benchmark"] if each.content["rows"] else each.path.parent.name
        settings = {"rows": len(each.content["rows"]), "threads": each.content.get("threads")}
        command = NOT_KEPT.format(str(name).partition("-")[0])
        lines.append(_line(each, f"benchmark {name}", "", settings, command))
    for each in records.fidelities:
        settings = {name: each.content[name] for name in ("preset", "text", "tokens", "seed") if name in each.content}
        lines.append(_line(each, "fidelity", each.content["model"], settings, NOT_KEPT.format("fidelity")))
    columns = [Column(title, title, number=title == "n") for title in (*WHAT, "n", *MORE)]
    return Table("records", "Every record behind this page.", columns, lines)


WHAT = ("kind", "model", "method", "task")
MORE = ("settings", "command", "record", "finished", "revision", "machine")


def _task_line(each: TaskResult) -> dict[str, Any]:
    model, task, method = each.place
    config = each.record["config"]
    settings = {name: value for name, value in config["method"].items() if name != "name"}
    said = {**settings, "dtype": each.record["key_parts"]["model"].get("dtype"), "scoring": config.get("scoring")}
    prompts = told(config)
    return {
        "kind": "task", "model": model, "method": method, "task": task, "n": each.record["n_documents"],
        "settings": ", ".join([_settings(said), *prompts]), "command": command_of(config, task),
        "record": named(each.path), **_made(each.record),
    }  # fmt: skip


def _line(found: Stored, kind: str, model: str, settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    return {
        "kind": kind, "model": model, "method": "", "task": "", "n": None, "settings": _settings(settings),
        "command": command, "record": named(found.path), **_made(found.content),
    }  # fmt: skip


def _made(record: Mapping[str, Any]) -> dict[str, str]:
    """When, by which code and where, as far as the record says."""
    made = record.get("provenance") or record
    git, machine = record.get("git") or {}, record.get("machine") or {}
    where = ", ".join([*([machine["cpu"]] if machine.get("cpu") else []), *machine.get("gpus", [])])
    changed = " and changes" if git.get("dirty") else ""
    return {
        "finished": str(record.get("finished") or made.get("date") or "–"),
        "revision": f"{git['revision'][:10]}{changed}" if git.get("revision") else "–",
        "machine": where or "–",
    }


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in settings.items() if value not in (None, [], {}))


def _short(value: Any) -> str:
    """Runs and lists of counts as the tables have them, other lists one by one."""
    names = isinstance(value, list) and not all(isinstance(each, int | list) for each in value)
    return " ".join(map(str, value)) if names else brief(value)


def named(path: Path) -> str:
    """Where a record lies, without what names the machine."""
    if not path.is_absolute():
        return path.as_posix()
    ours = conf_dir().absolute().parent
    return path.relative_to(ours).as_posix() if path.is_relative_to(ours) else "/".join(path.parts[-3:])
