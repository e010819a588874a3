"""Korean text that lm-eval ships: the examples of KMMLU's hard questions, worked out step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import yaml

from chai_eval.errors import RunError

FOLDER = Path(lm_eval.__file__).parent / "tasks" / "kmmlu" / "cot_hard"


def worked_examples() -> Iterator[str]:
    """Question, choices and reasoning of each example as prompts have them, subject by subject.

    None where lm-eval has no such tasks.
    Source: Son et al., KMMLU: Measuring Massive Multitask Language Understanding in Korean (arXiv 2402.11548).

    Raises
    ------
    RunError
        For a task file that can't be read.
    """
    for path in sorted(FOLDER.glob("kmmlu_*.yaml")):
        for example in _examples(path):
            choices = "".join(f"\n{letter}.{example[letter]}" for letter in "ABCD")
            yield f"{example['question']}{choices}\n정답: {example['target']}"


def _examples(path: Path) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of the same texts a tenth of the time
    try:
        found: list[dict[str, Any]] = yaml.load(path.read_text(encoding="utf-8"), loader)["fewshot_config"]["samples"]
        return found
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise RunError(f"text: {path} can't be read ({error!r})") from error
