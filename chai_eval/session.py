"""What one process keeps from job to job of a sweep: the loaded model and the prepared tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chai_eval.checksum import sha256_of
from chai_eval.scoring.hashes import content_hash
from chai_eval.scoring.ranks import Ranks
from chai_eval.settings import ModelSettings, TaskSettings
from chai_eval.store.code import NumericCode
from chai_eval.task_settings import AS_TASKS_SAY

if TYPE_CHECKING:
    from chai_eval.scoring.prepare import PreparedTask

# What transformers writes into a configuration without any meaning for the numbers.
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")

# The package that transformers makes of code that comes with weights.
REMOTE_CODE = "transformers_modules."


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to score, and the hashes that tell it from every other.

    `fingerprint` is of the weights; `architecture` of the configuration, how texts are generated, and code that came
    with the weights, without what has no say in the numbers; `vocabulary` of the tokenizer. `code` is the numeric code
    that this process runs: read once, as the files may be edited while it does.
    """

    model: Any
    tokenizer: Any
    fingerprint: str
    architecture: str
    vocabulary: str
    code: NumericCode = field(default_factory=NumericCode.of)

    @property
    def dtype(self) -> str:
        """Precision that the model computes in."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Device of the model's first weights."""
        return str(self.model.device)


def load(settings: ModelSettings) -> LoadedModel:
    """Load a model and take its hashes, before anything has had the chance to change its tokenizer."""
    from chai_eval import models

    model, tokenizer = models.load(settings)
    return LoadedModel(model, tokenizer, models.fingerprint(model), _architecture(model), _vocabulary(tokenizer))


@dataclass
class Session:
    """Loads each model once, and prepares each task once; one model is kept at a time, for its size."""

    loader: Callable[[ModelSettings], LoadedModel] = load
    ranks: Ranks = field(default_factory=Ranks)
    _loaded: tuple[ModelSettings, LoadedModel] | None = None
    _tasks: dict[Any, Any] = field(default_factory=dict)
    _prepared: dict[Any, PreparedTask] = field(default_factory=dict)

    def model(self, settings: ModelSettings) -> LoadedModel:
        """The loaded model; settings that have no say in loading don't load it again."""
        wanted = replace(settings, clusters=None, default_limit=None, paper=None)
        if self._loaded is None or self._loaded[0] != wanted:
            # The old one goes first: there may not be room for both.
            self._loaded = None
            with self.ranks.together():
                self._loaded = (wanted, self.loader(_placed(settings, self.ranks)))
        return self._loaded[1]

    def task(self, name: str, settings: TaskSettings) -> Any:
        """The lm-eval task of that name."""
        from chai_eval.scoring.tasks import TEXT, load_task

        wanted = replace(settings, choice=name, prompts=AS_TASKS_SAY)
        if name != TEXT:
            wanted = replace(wanted, text=None, limit=None)
        if wanted not in self._tasks:
            with self.ranks.together():
                self._tasks[wanted] = load_task(name, wanted)
        return self._tasks[wanted]

    def prepared(self, name: str, settings: TaskSettings, seed: int, loaded: LoadedModel | None = None) -> PreparedTask:
        """The task with the requests of its documents built; a chat template is that of the model."""
        from chai_eval.scoring.prepare import prepare

        limit, prompts, tokenizer = settings.limit, settings.prompts, None if loaded is None else loaded.tokenizer
        template = json.dumps(tokenizer.chat_template) if prompts.apply_chat_template and tokenizer else None
        key = (name, replace(settings, choice=name), seed, template)
        if key not in self._prepared:
            task = self.task(name, settings)
            with self.ranks.together():
                self._prepared[key] = prepare(task, limit=limit, seed=seed, prompts=prompts, tokenizer=tokenizer)
        return self._prepared[key]


def _placed(settings: ModelSettings, ranks: Ranks) -> ModelSettings:
    """Give each of several processes a GPU of its own."""
    if ranks.size == 1 or settings.device not in ("auto", "cuda"):
        return settings
    import torch

    if not torch.cuda.is_available():
        return settings
    torch.cuda.set_device(ranks.local_rank)
    return replace(settings, device=f"cuda:{ranks.local_rank}")


def _architecture(model: Any) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}
    generation = getattr(model, "generation_config", None)
    # What isn't set has no say; names with a bar before them say where the others come from.
    given = {
        name: value
        for name, value in ({} if generation is None else generation.to_dict()).items()
        if value is not None and name not in VOLATILE and name[0] != "_"
    }
    return content_hash([config, given, _own_code(model)])


def _own_code(model: Any) -> dict[str, str]:
    """Hashes of the source files that `trust_remote_code` loaded for a model; empty for transformers' own models."""
    names = {type(each).__module__ for each in (model.config, *model.modules())}
    hashes = {}
    for package in {f"{name.rpartition('.')[0]}." for name in names if name.startswith(REMOTE_CODE)}:
        # All of it that is loaded: a file may import others that lie beside it.
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name.startswith(package) and file is not None:
                hashes[name.removeprefix(package)] = sha256_of(Path(file))
    return hashes


def _vocabulary(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return content_hash([whole, special])
