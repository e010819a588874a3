"""What `--help` says, read from the configuration files: their first line and the text after each setting."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from chai_eval.cli.overrides import SHORT, choices, launchers
from chai_eval.resources import conf_dir
from chai_eval.scoring.tasks import PAPER_TASKS, TEXT

USAGE = """\
Score a method against plain multi-head attention (MHA) on the same documents, task by task.

  python -m chai_eval [setting=value ...]       one run; without settings, the quickstart
  python -m chai_eval -m [setting=a,b ...]      a sweep: one run for each combination of values
  python -m chai_eval.measure [setting=value ...]  latency and memory alone, see its --help
  python -m chai_eval status [results_dir=...]  results so far: finished, partial, failed
  python -m chai_eval --help | --version
"""

EXAMPLES = """\
Examples
  python -m chai_eval model=llama7b limit=200
  python -m chai_eval path=/models/my-llama method.clusters='[[32,18],[4,14]]' task=[piqa,winogrande]
  python -m chai_eval -m method.probe_tokens=1,3,5,8 'task=piqa,boolq'
"""

WIDTH = 110


def help_text() -> str:
    """The whole help, with every choice of model, method and task and every setting."""
    config = conf_dir() / "config.yaml"
    default = dict(re.findall(r"^  - (\w+): \"?(\w+)\"?$", config.read_text(encoding="utf-8"), flags=re.MULTILINE))
    parts = [USAGE]
    for group in ("model", "method", "measure"):
        lines = [f"{group}=…  (default {default[group]})"]
        for name in choices(group):
            path = conf_dir() / group / f"{name}.yaml"
            lines += _entry(name, _first_comment(path))
            if group == "method":
                lines += [each for setting in _settings(path) for each in _entry(*setting, prefix="method.", indent=4)]
        if group == "measure":
            grid = conf_dir() / group / "base" / "grid.yaml"
            lines += [each for setting in _settings(grid) for each in _entry(*setting, prefix="measure.", indent=4)]
        parts.append("\n".join(lines) + "\n")
    tasks = [_entry("paper", ", ".join(PAPER_TASKS)), _entry(TEXT, RUNNING_TEXT), _entry("<name>", ANY_TASK)]
    parts.append("\n".join(["task=…  (default paper)", *(line for entry in tasks for line in entry)]) + "\n")
    settings = [each for setting in _settings(config) for each in _entry(*setting, indent=2)]
    settings += _entry("launcher=basic", f"what runs the jobs of a sweep: {', '.join(launchers())}")
    short = ", ".join(f"{name}=" for name, whole in SHORT.items() if whole.startswith("model."))
    settings += _entry("model.…", f"any line of the model's file; for short: {short}")
    parts.append("\n".join(["Settings", *settings]) + "\n")
    return "\n".join([*parts, EXAMPLES])


RUNNING_TEXT = "the perplexity of running text, per byte: task=text text=<file>, passages, c4 or auto"
ANY_TASK = "any task of lm-eval by its name; several as task=[piqa,winogrande]"


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def _settings(path: Path) -> list[tuple[str, str]]:
    """Settings of a file with the text that follows each, as `name=default` and text."""
    found = re.findall(r"^(\w+): (.+?)  # (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(name if value.startswith("${") else f"{name}={value}", text) for name, value, text in found]


def _entry(name: str, text: str, *, prefix: str = "", indent: int = 2) -> list[str]:
    head = f"{' ' * indent}{prefix}{name}"
    column = 30
    lines = textwrap.wrap(text, WIDTH - column) or [""]
    if len(head) > column - 2:
        return [head, *(" " * column + line for line in lines)]
    return [head.ljust(column) + lines[0], *(" " * column + line for line in lines[1:])]
