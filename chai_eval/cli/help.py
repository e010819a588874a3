"""What `--help` says: of settings what their fields say, of a file in `conf/` its first line.

A method's settings stand in its file in `conf/method/`, each with a comment after it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from chai_eval.cli.configuration import SHORT, choices, has_model, launchers
from chai_eval.measure_settings import MeasureSettings
from chai_eval.resources import conf_dir
from chai_eval.schema import entries
from chai_eval.scoring.tasks import PAPER_TASKS, TEXT
from chai_eval.settings import ModelSettings, Settings

USAGE = """\
Score a method against plain multi-head attention (MHA) on the same documents, task by task.

  python -m chai_eval [setting=value ...]             one run; without settings, the quickstart
  python -m chai_eval -m [setting=a,b ...]            a sweep: one run for each combination of values
  python -m chai_eval +experiment=NAME [quick=true]   a table or figure of the paper
  python -m chai_eval measure [setting=value ...]     latency and memory alone
  python -m chai_eval calibrate [setting=value ...]   cluster counts, memberships and predictors of a model
  python -m chai_eval analyse [setting=value ...]     how a model's heads cluster, as data and figures
  python -m chai_eval frontier [setting=value ...]    all methods at equal bytes: lost against saved
  python -m chai_eval compare A B [setting=value ...] two runs of lm-eval, or results, document by document
  python -m chai_eval report [setting=value ...]      a page, tables and figures from the records of all these
  python -m chai_eval benchmark [NAME ...]            the figures that are promised; without a name, a list
  python -m chai_eval status [results_dir=...]        results so far: finished, partial, failed
  python -m chai_eval [measure|calibrate|analyse|frontier|compare|report] --help | --version
"""

EXAMPLES = """\
Examples
  python -m chai_eval model=llama7b limit=200
  python -m chai_eval path=/models/my-llama method.clusters='[[32,18],[4,14]]' task=[piqa,winogrande]
  python -m chai_eval -m method.probe_tokens=1,3,5,8 'task=piqa,boolq'
"""

MEASURE = """\
Measure a model's latency and memory under its own attention and under methods, side by side.

  python -m chai_eval measure [setting=value ...]
"""

MEASURE_MORE = """\
Model, method and results_dir as for python -m chai_eval (see its --help). weights=random measures a model whose weights
nobody has here, layers=4 its first layers only.

  python -m chai_eval measure model=llama7b weights=random layers=4 method.clusters=[[4,4]] dtype=bfloat16
"""

FRONTIER = """\
Compare all methods over their range at equal K,V bytes: KL and same token, as a table, data and a figure.

  python -m chai_eval frontier [setting=value ...]
"""

COMPARE = """\
Compare two runs on the same documents: paired differences, and the documents that flipped.

  python -m chai_eval compare A B [setting=value ...]

A and B are folders of lm-eval's logs (lm_eval --log_samples --output_path FOLDER) or of our results, or patterns of
such, as 'results/smollm2_mha/*/chai-*'.
"""

CALIBRATE = """\
Calibrate a model: how many clusters each layer keeps, which heads they are, and what the methods need besides.

  python -m chai_eval calibrate [setting=value ...]

Writes <cache>/calibration/<model>/, where methods find it by the model's name. Interrupted and started again, it goes
on from where it was.
"""

ANALYSE = """\
See how a model's heads cluster: how alike they attend in each layer (the paper's Figure 2), what fewer clusters lose,
with the elbow (Figure 8), how membership moves as more tokens are seen (Figure 9), and how large clusters are.

  python -m chai_eval analyse [setting=value ...]

Writes parquet files and figures to results/analysis/<model>/.
"""

REPORT = """\
Write a page that says whether a method is worth it, with tables (Markdown, CSV, LaTeX) and figures (SVG, PNG), from
records alone: no model is loaded, nothing is scored.

  python -m chai_eval report [setting=value ...]

Writes <out>/index.html, which opens without a network, <out>/tables/ and <out>/figures/.
"""

RUNNING_TEXT = "the perplexity of running text, per byte: task=text text=<file>, stdlib, kmmlu, passages, c4 or auto"
ANY_TASK = "any task of lm-eval by its name; several as task=[piqa,winogrande]"
WIDTH, COLUMN = 110, 30


def help_text() -> str:
    """The whole help, with every choice of model, method and task and every setting."""
    first = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    default = {group: name for each in first if isinstance(each, dict) for group, name in each.items()}
    within: Mapping[str, list[str]] = {"model": _settings(ModelSettings, "model."), "measure": _measure()}
    parts = [USAGE]
    for group in ("model", "method", "measure"):
        lines = [f"{group}=…  (default {default[group]})"]
        for name in choices(group):
            path = conf_dir() / group / f"{name}.yaml"
            lines += _entry(name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "))
            lines += _commented(path, "method.") if group == "method" else []
        parts.append("\n".join([*lines, *within.get(group, [])]) + "\n")
    tasks = [_entry("paper", ", ".join(PAPER_TASKS)), _entry(TEXT, RUNNING_TEXT), _entry("<name>", ANY_TASK)]
    parts.append("\n".join(["task=…  (default paper)", *(line for entry in tasks for line in entry)]) + "\n")
    parts.append("\n".join(["+experiment=…", *_experiments()]) + "\n")
    settings = _settings(Settings, indent=2)
    settings += _entry("launcher=basic", f"what runs the jobs of a sweep: {', '.join(launchers())}")
    short = ", ".join(f"{name}=" for name, whole in SHORT.items() if whole.startswith("model."))
    settings += _entry("model.…", f"any setting of the model; for short: {short}")
    parts.append("\n".join(["Settings", *settings]) + "\n")
    return "\n".join([*parts, EXAMPLES])


def _experiments() -> Iterator[str]:
    for name in choices("experiment"):
        stated = yaml.safe_load((conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))["experiment"]
        yield from _entry(name, f"{stated['title']} ({stated['paper']})")
    yield from _entry("quick=true", "with an experiment: a look at it in minutes, of few documents, texts or points")
    yield from _entry(
        "figures=null", "with an experiment: draw figures: true, false; null where matplotlib is installed"
    )


def measure_help() -> str:
    """What `measure --help` says."""
    several = _entry("method=chai,v_reuse", "methods side by side, and so with several values of a method's setting")
    kind = _entry("measure=full", "latency, memory, or full for both")
    return "\n".join([MEASURE, "\n".join(["Settings", *kind, *_measure(2), *several]) + "\n", MEASURE_MORE])


def offline_help(usage: str, kind: type[Any]) -> str:
    """What `--help` of commands with settings of their own says."""
    models = _entry("model=…", f"one of {', '.join(choices('model'))}") if has_model(kind) else []
    return usage + "\n" + "\n".join(["Settings", *models, *_settings(kind, indent=2)]) + "\n"


def _measure(indent: int = 4) -> list[str]:
    return _settings(MeasureSettings, "measure.", indent)


def _settings(kind: type[Any], prefix: str = "", indent: int = 4) -> list[str]:
    lines = []
    for name, (default, says) in entries(kind).items():
        value = default if isinstance(default, str) else json.dumps(default, separators=(",", ":"))
        # A default that is another setting's says nothing.
        shown = name if value.startswith("${") else f"{name}={value}"
        lines += _entry(prefix + shown, says, indent)
    return lines


def _commented(path: Path, prefix: str) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        setting, mark, says = line.partition("  # ")
        name, _, value = setting.partition(": ")
        if mark and name.isidentifier():
            yield from _entry(prefix + (name if value.startswith("${") else f"{name}={value}"), says, 4)


def _entry(name: str, text: str, indent: int = 2) -> list[str]:
    head = " " * indent + name
    first, *others = [" " * COLUMN + line for line in textwrap.wrap(text, WIDTH - COLUMN) or [""]]
    return [head, first, *others] if len(head) > COLUMN - 2 else [head.ljust(COLUMN) + first[COLUMN:], *others]
