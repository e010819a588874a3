"""A folder of task files as a user might write it, with documents that lie beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ("cat", "mat", "noon", "head", "river", "stone", "seven", "blue", "quiet", "lamp")

CHOICE = """
task: own_choice
tag: own_tag
dataset_path: json
dataset_kwargs:
  data_files: {{train: '{folder}/train.jsonl', test: '{folder}/test.jsonl'}}
output_type: multiple_choice
training_split: train
test_split: test
description: "Complete the sentence.\\n\\n"
doc_to_text: "{{{{question.strip()}}}} is"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""

# The rest is taken from the file above.
TEXT = """
include: own_choice.yaml
task: own_text
output_type: generate_until
doc_to_target: "{{{{choices[answer]}}}}"
doc_to_choice: null
generation_kwargs: {{until: ["\\n", "q"], max_gen_toks: 12}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""

ROLLING = """
include: own_choice.yaml
task: own_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
doc_to_choice: null
metric_list: [{{metric: byte_perplexity}}]
"""

GROUP = """
group: own_group
task: [own_text, {{group: own_inner, task: [own_choice]}}, own_tag]
aggregate_metric_list: [{{metric: acc}}]
"""


def documents(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def text(length: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(length))

    return [
        {
            "question": f" the {text(draw.randint(2, 7))}",
            "choices": [text(draw.randint(1, 3)) for _ in range(3)],
            "answer": draw.randrange(3),
        }
        for _ in range(count)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_folder(folder: Path, scored: int = 5) -> Path:
    """Write the task files, their training documents and as many to score as wanted; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "train.jsonl", documents(9, seed=1))
    write_lines(folder / "test.jsonl", documents(scored, seed=2))
    for name, text in (("own_choice", CHOICE), ("own_text", TEXT), ("own_rolling", ROLLING), ("own_group", GROUP)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder
