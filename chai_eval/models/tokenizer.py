"""The tokenizer of a model: its own, another one, or the one that needs no files."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.errors import RunError, SettingError
from chai_eval.hub import TOKENIZER_WITHOUT, hub
from chai_eval.models.architectures import reason
from chai_eval.models.builtin import VOCAB_SIZE, byte_tokenizer
from chai_eval.settings import ModelSettings


def load_tokenizer(settings: ModelSettings, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer that lies at `source`: a directory, a name on the hub, or `builtin`; RunError if unreadable."""
    if source == "builtin":
        return byte_tokenizer()
    # A revision is of the weights; it names nothing in another repository.
    revision = settings.revision if settings.tokenizer is None else None
    if source.startswith("~"):
        source = str(Path(source).expanduser())
    try:
        with hub(asked=not Path(source).is_dir()):
            return AutoTokenizer.from_pretrained(
                source, revision=revision, trust_remote_code=settings.trust_remote_code
            )
    except Exception as error:
        why = f"{type(error).__name__}: {reason(error)}"
        raise RunError(f"model.tokenizer: {source} can't be loaded ({why}); {TOKENIZER_WITHOUT}") from error


def tokenizer_of_random(settings: ModelSettings, own: str | None, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a model with random weights: as set, else the one at `own`, else the builtin one.

    SettingError where the model has fewer embeddings than the builtin one has tokens, RunError where it can't be read.
    """
    source = settings.tokenizer or own or "builtin"
    if source == "builtin" and model.config.vocab_size < VOCAB_SIZE:
        raise SettingError(
            f"model.config: vocab_size {model.config.vocab_size} is too small for the builtin tokenizer; "
            f"allowed: {VOCAB_SIZE} or more, or model.tokenizer"
        )
    return load_tokenizer(settings, source)
