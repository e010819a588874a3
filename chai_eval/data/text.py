"""Running text: from the hub, a file, the assets or installed packages, cut into samples as it streams by."""

from __future__ import annotations

import itertools
import json
import platform
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.hub import hub, unreachable

if TYPE_CHECKING:
    import datasets

C4 = "allenai/c4"
C4_NAME = f"{C4} en"
# Documents from which the next one is drawn: text comes in another order for another seed, whatever its length.
SHUFFLE_BUFFER = 10_000
# Lines of plain text are joined up to a blank line, or the first line end after so many characters.
PASSAGE_CHARACTERS = 2_000
AS_IT_STANDS = "stdlib, kmmlu, c4, passages, auto, or a UTF-8 file: plain text, or JSON lines with text"
ALLOWED = f"chat, {AS_IT_STANDS}"

# A text, or the turns of a conversation, which the chat template of a tokenizer makes one.
Document = str | list[dict[str, str]]


@dataclass(frozen=True)
class Text:
    """A stream of documents, and what it is called in records."""

    name: str
    documents: Iterator[Document]


def open_text(text: str, seed: int | None) -> Text:
    """Open running text, its documents in the order of a seed; None leaves them as they stand.

    It is `c4` (the hub's), `passages` (SQuAD and SciQ, from the assets), `auto` (C4 where the hub can be reached, else
    passages), `stdlib` (source files of Python's standard library), `kmmlu` (Korean: KMMLU's worked examples, from
    lm-eval), `chat` (questions of the tasks with their answers, as conversations), or the path of a file. SettingError
    for a file that isn't there, isn't UTF-8, or has no text: what lies further on in it is found when it is read.
    RunError where the hub or the assets can't be reached.
    """
    if text == "auto":
        text = "c4" if _hub_answers() else "passages"
    if text == "c4":
        return Text(C4_NAME, _c4(seed))
    if text in ("passages", "chat"):
        from chai_eval.data.documents import calibration_passages, conversations

        if text == "chat":
            return Text("chat about PIQA, ARC and BoolQ", _ordered(conversations(), seed))
        return Text("SQuAD and SciQ passages", _ordered(calibration_passages(), seed))
    if text == "stdlib":
        from chai_eval.data.library import standard_library

        name, found = f"standard library of Python {platform.python_version()}", standard_library()
    elif text == "kmmlu":
        from chai_eval.data.korean import worked_examples

        name, found = "KMMLU's worked examples", worked_examples()
    else:
        path = Path(text).expanduser()
        if not path.is_file():
            raise SettingError(f"text: {text} is no file; allowed: {ALLOWED}")
        name, found = path.name, _read(path)
    first = next(found, None)
    if first is None:
        raise SettingError(f"text: {text} has no text in it; allowed: {ALLOWED}")
    return Text(name, _ordered(itertools.chain([first], found), seed))


def text_documents(*, text: str, limit: int | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Documents of running text as they stand, `limit` of them or all: what `custom_dataset` in tasks/text.yaml calls.

    Raises as `open_text` does; SettingError also for C4 without a limit, which nobody would see the end of, and for
    conversations.
    """
    import datasets

    if text == "chat":  # what is said in turns is no text before a model's template has made it one
        raise SettingError(f"text: chat given with task=text; allowed: {AS_IT_STANDS}")
    found = open_text(text, None)
    if limit is None and found.name == C4_NAME:
        raise SettingError("limit: None given with text=c4; allowed: a whole number from 1 up")
    # In memory, as the documents of the other local tasks are.
    return {"test": datasets.Dataset.from_dict({"text": list(itertools.islice(found.documents, limit))})}


def cut(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[Tensor]:
    """Cut documents into samples of `tokens` tokens, each beginning as a request does (BOS where there is one).

    A sample, `[tokens]`, int64, begins with a document or with what the last one had left; documents that are too short
    are followed by the next one. What is left at the end is dropped, unless it is all there is. SettingError for
    samples with no room for text, and for conversations where the tokenizer has no chat template that takes them.
    """
    start = list(itertools.takewhile(set(tokenizer.all_special_ids).__contains__, tokenizer("a")["input_ids"]))
    if tokens <= len(start):
        raise SettingError(f"tokens: {tokens} given; allowed: a whole number from {len(start) + 1} up")
    held: list[int] = []
    complete = False
    for document in documents:
        text = _rendered(document, tokenizer)
        held += tokenizer(("\n" if held else "") + text, add_special_tokens=False)["input_ids"]
        while len(start) + len(held) >= tokens:
            taken = tokens - len(start)
            yield torch.tensor(start + held[:taken])
            held, complete = held[taken:], True
    if held and not complete:
        yield torch.tensor(start + held)


def batches(samples: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Stack every `size` samples: `[batch, tokens]`; the last batch may be smaller."""
    iterator = iter(samples)
    while together := list(itertools.islice(iterator, size)):
        yield torch.stack(together)


def _rendered(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(document, str):
        return document
    allowed = "a model whose tokenizer has a chat template, or other text"
    if not tokenizer.chat_template:
        raise SettingError(f"text: a conversation given, and the tokenizer has no chat template; allowed: {allowed}")
    try:
        return str(tokenizer.apply_chat_template(document, tokenize=False)).removesuffix("\n")
    except (TemplateError, ValueError) as error:  # of several templates none is the default, or it takes other turns
        reason = failure_line(error)
        raise SettingError(f"text: the chat template takes no conversation ({reason}); allowed: {allowed}") from error


def _read(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _json_lines(path, file) if path.suffix in (".jsonl", ".json") else _passages(file)
    except UnicodeDecodeError as error:
        raise SettingError(
            f"text: {path} is not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason}); allowed: {ALLOWED}"
        ) from error
    except OSError as error:
        raise SettingError(f"text: {path} can't be read ({error.strerror}); allowed: {ALLOWED}") from error


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line.removeprefix("\ufeff"))  # as where files were put one after the other
        except ValueError as error:
            raise SettingError(f"text: line {number} of {path} is no JSON; allowed: {ALLOWED}") from error
        found = document.get("text") if isinstance(document, dict) else document
        if not isinstance(found, str):
            raise SettingError(f"text: line {number} of {path} has no text; allowed: {ALLOWED}")
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise SettingError(f"text: line {number} of {path} has half a character; allowed: {ALLOWED}") from error
        if found.strip():
            yield found


def _passages(lines: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    for line in lines:
        if line.strip():
            held.append(line)
        if held and (not line.strip() or sum(map(len, held)) >= PASSAGE_CHARACTERS):
            yield "".join(held).strip()
            held = []
    if held:
        yield "".join(held).strip()


def _ordered(documents: Iterator[Document], seed: int | None) -> Iterator[Document]:
    if seed is None:
        yield from documents
        return
    drawn = random.Random(seed)
    waiting = list(itertools.islice(documents, SHUFFLE_BUFFER))
    for document in documents:
        at = drawn.randrange(len(waiting))
        yield waiting[at]
        waiting[at] = document
    drawn.shuffle(waiting)
    yield from waiting


def _c4(seed: int | None) -> Iterator[str]:
    try:
        import datasets

        with hub():
            stream: Any = datasets.load_dataset(C4, "en", split="train", streaming=True)
        for row in stream if seed is None else stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
            yield row["text"]
    except Exception as error:  # datasets, the hub's client and the network each have errors of their own
        raise RunError(
            f"text: {C4} can't be read from the hub ({failure_line(error)}); text=passages needs no hub, nor a file"
        ) from error


def _hub_answers() -> bool:
    if unreachable():
        return False
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(C4, timeout=5)
    except Exception:  # whatever it is, text has to come from elsewhere
        return False
    return True
