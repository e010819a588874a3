"""Few-shot examples of a task: how many, and whether there are enough to draw from."""

from __future__ import annotations

import logging

from lm_eval.api.task import Task

from chai_eval.errors import SettingError

log = logging.getLogger(__name__)


def set_examples(task: Task, num_fewshot: int | None, seed: int) -> None:
    """Set how many examples a task's prompts have, by lm-eval's rule, and the seed that draws them.

    Raises
    ------
    SettingError
        There are too few to draw from.
    """
    name, own = task.config.task, task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0:
        if num_fewshot > 0:
            log.warning("%s: num_fewshot stays 0, as its task file says so and lm-eval leaves it", name)
    elif num_fewshot is not None or own is None:
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(seed)
    if task.get_config("num_fewshot") and hasattr(task, "sampler"):
        _check(task)


def _check(task: Task) -> None:
    name, count, split = task.config.task, task.get_config("num_fewshot"), task.fewshot_cfg.split
    # lm-eval then draws one more, and leaves out the document at hand.
    apart = split == task.config.test_split
    available = len(task.sampler.df) - apart
    if count > available:
        raise SettingError(
            f"num_fewshot: {count} given, and {name} has {available} documents to draw examples from; "
            f"allowed: 0 to {max(available, 0)}"
        )
    scored = task.config.test_split or task.config.validation_split
    others = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    from_scored = split == scored or (split is None and not others)
    if from_scored and task.fewshot_cfg.samples is None:
        but = ", but for the one at hand" if apart else ", the one at hand among them (lm-eval's own rule)"
        log.warning("%s: examples are drawn from the documents that are scored%s; it has no others", name, but)
