"""The hub, where it can't be reached: that is found out once, where its client would try for half a minute."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from chai_eval.errors import RunError

if TYPE_CHECKING:
    from chai_eval.settings import ModelSettings

# Seconds for the hub to answer anything at all; the client's own setting counts where it is made.
PATIENCE = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 2)
MODEL_WITHOUT = "model.path=<local directory> or model.weights=random needs no hub"
TOKENIZER_WITHOUT = "a local directory, or builtin, needs no hub"
# One of them is in the cache wherever a tokenizer is.
_OF_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "config.json")


def unreachable() -> str | None:
    """Why the hub can't be reached; None where it answers, be it with an error: then its client may try again.

    The hub's own client asks, so that proxies, certificates and `HF_ENDPOINT` are those of what follows.
    """
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "offline mode is on (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)"
    late = f"{constants.ENDPOINT} gives no answer within {PATIENCE:g} s (HF_HUB_ETAG_TIMEOUT sets another time)"
    answers: SimpleQueue[str | None] = SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/robots.txt", timeout=PATIENCE)
        except Exception as error:  # the client's libraries each have errors of their own
            said = " ".join(str(error).split())[:200] or type(error).__name__
            answers.put(late if "Timeout" in type(error).__name__ else f"{constants.ENDPOINT}: {said}")
        else:
            answers.put(None)

    # Looking up a name knows no timeout, and must not keep the process from ending either.
    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE + 0.25)
    except Empty:
        return late


@contextmanager
def hub(*, asked: bool = True) -> Iterator[None]:
    """Load from the hub within this; where it can't be reached, what is in the cache is loaded without asking it.

    ConnectionError, in place of the client's own errors, where what is wanted isn't in the cache. For what is loaded
    from a directory (not `asked`) this does nothing.
    """
    from huggingface_hub import constants

    why = unreachable() if asked else None
    if why is None:
        yield
        return
    # What `HF_HUB_OFFLINE` sets; datasets has a copy of it.
    datasets = sys.modules.get("datasets.config")
    switches: list[Any] = [constants] if datasets is None else [constants, datasets]
    before = [each.HF_HUB_OFFLINE for each in switches]
    try:
        for each in switches:
            each.HF_HUB_OFFLINE = True
        yield
    except OSError as error:
        raise ConnectionError(_said(why)) from error
    finally:
        for each, value in zip(switches, before, strict=True):
            each.HF_HUB_OFFLINE = value


def is_local(name: str) -> bool:
    """Whether a name is written as a path on this machine: no name on the hub looks like it."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def check_hub(settings: ModelSettings) -> None:
    """Raise RunError for what only the hub has where it can't be reached, before torch is even imported."""
    missing = []
    # Whether random weights need the hub depends on the config.
    if settings.weights != "random" and _only_on_hub(settings.path, settings.revision, ("config.json",)):
        missing.append((f"model.path: {settings.path}", MODEL_WITHOUT))
    if settings.tokenizer != "builtin" and _only_on_hub(settings.tokenizer, None, _OF_TOKENIZERS):
        missing.append((f"model.tokenizer: {settings.tokenizer}", TOKENIZER_WITHOUT))
    if missing and (why := unreachable()):
        what, without = missing[0]
        raise RunError(f"{what} can't be loaded from the hub ({_said(why)}); {without}")


def _said(why: str) -> str:
    return f"it can't be reached, {why}, and the cache on this machine lacks what is needed"


def _only_on_hub(name: str | None, revision: str | None, files: tuple[str, ...]) -> bool:
    """Whether it is the name of something on the hub of which the cache has none of `files`."""
    if name is None or ":" in name or is_local(name) or Path(name).exists():
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return not any(isinstance(try_to_load_from_cache(name, each, revision=revision), str) for each in files)
    except HFValidationError:
        return False  # no name at all, as its loading will say
