"""lm-eval's task of a file of ours, whose few-shot examples are read where a prompt has any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml


class LocalTask(ConfigurableTask):
    """As lm-eval makes it, but that it doesn't make a list of all documents to draw examples from before it has to."""

    @classmethod
    def of(cls, file: Path, metadata: Mapping[str, Any]) -> LocalTask:
        """The task of a file; lm-eval hands metadata to its `custom_dataset`, as `lm_eval --metadata ...` does."""
        config = deepcopy(load_yaml(file, resolve_func=True))
        return cls(config={**config, "metadata": {**config["metadata"], **metadata}})

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config=config)
        self.sampler.replace_df(Examples(self.fewshot_docs()))

    def fewshot_docs(self) -> Any:
        """Documents to draw examples from: none yet while lm-eval makes the sampler."""
        return super().fewshot_docs() if hasattr(self, "sampler") else ()


class Examples(Sequence[Any]):
    """Documents as a list that is made when one of them is asked for."""

    def __init__(self, documents: Iterable[Any]) -> None:
        self._documents: Any = documents

    @cached_property
    def _all(self) -> list[Any]:
        return list(self._documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]
