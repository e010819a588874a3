from __future__ import annotations

import argparse
import inspect
import json
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from jinja2 import Environment

from chai_eval.data import korean
from chai_eval.data.text import batches, cut, open_text, text_documents
from chai_eval.errors import RunError, SettingError
from chai_eval.models.builtin import byte_tokenizer


def written(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def documents(text: str, seed: int | None = 0) -> list[str]:
    return [each for each in open_text(text, seed).documents if isinstance(each, str)]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [{"text": "one\ntwo", "url": "x"}, {"text": " "}, {"text": "three"}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert sorted(documents(path)) == ["one\ntwo", "three"]


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    lines = [f"{json.dumps({'text': text})}\n".encode("utf-8-sig") for text in ("one", "two")]
    assert sorted(documents(written(tmp_path / "a.jsonl", b"".join(lines)))) == ["one", "two"]
    assert documents(written(tmp_path / "a.txt", "one".encode("utf-8-sig"))) == ["one"]


def test_plain_text_is_read_in_passages(tmp_path: Path) -> None:
    assert sorted(documents(written(tmp_path / "a.txt", "a\nb\n\n\nc\n"))) == ["a\nb", "c"]


def test_the_seed_orders_documents_and_loses_none(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "\n\n".join(map(str, range(50))))
    first, again, other = documents(path, 1), documents(path, 1), documents(path, 2)
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted(map(str, range(50)))


def test_samples_follow_each_other_and_begin_as_requests_do() -> None:
    tokenizer = byte_tokenizer()
    samples = list(cut(["abcdefgh", "ij"], tokenizer, 5))
    assert all(len(each) == 5 for each in samples)
    begin = tokenizer("a")["input_ids"][:-1]
    for each in samples:
        assert each[: len(begin)].tolist() == begin
    text = "".join(tokenizer.decode(each[len(begin) :]) for each in samples)
    assert "abcdefgh\nij".startswith(text)


def test_text_shorter_than_one_sample_is_one_sample() -> None:
    (only,) = cut(["ab"], byte_tokenizer(), 50)
    assert 2 <= len(only) < 50


@pytest.mark.parametrize("tokens", [0, 1])
def test_samples_without_room_for_text_are_refused_rather_than_cut_for_ever(tokens: int) -> None:
    with pytest.raises(SettingError, match=f"^tokens: {tokens} given; allowed: a whole number from 2 up$"):
        next(cut(["ab"], byte_tokenizer(), tokens))


TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def test_a_conversation_is_read_as_the_chat_template_of_the_model_writes_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    (only,) = cut([TALK, "text"], tokenizer, 60)
    assert tokenizer.decode(only, skip_special_tokens=True) == "user: Why?\nassistant: So.\ntext"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "text: a conversation given, and the tokenizer has no chat template; allowed: a model whose"),
        ("{{ raise_exception('no users') }}", "text: the chat template takes no conversation ("),
        ({"other": "a"}, "text: the chat template takes no conversation ("),
    ],
)
def test_a_conversation_without_a_template_that_takes_it_is_refused_on_one_line(template: object, said: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(SettingError) as caught:
        next(cut([TALK], tokenizer, 60))
    assert str(caught.value).startswith(said)
    assert "; allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_standard_library_is_pythons_own_sources_in_one_order_and_whole() -> None:
    found = documents("stdlib", None)
    assert found == documents("stdlib", None)
    lines = inspect.getsource(argparse).splitlines()
    start = next(at for at, each in enumerate(found) if lines[0] in each and lines[4] in each)
    several = "\n".join(found[start : start + 200]).splitlines()
    written = [line for line in lines if line.strip()]
    assert [line for line in several if line.strip()][: len(written)] == written
    assert max(map(len, found[start : start + 20])) < 10_000 < sum(map(len, found[start : start + 20]))
    assert f"Python {sysconfig.get_python_version()}" in open_text("stdlib", None).name


def test_korean_text_is_every_example_of_lm_evals_task_as_its_prompt_shows_it() -> None:
    found = documents("kmmlu", None)
    assert found == documents("kmmlu", None)
    assert len(found) == len(set(found)) > 200
    hangul = [sum("가" <= letter <= "힣" for letter in each) for each in found]
    assert sum(hangul) > 50_000
    task = yaml.safe_load((korean.FOLDER / "kmmlu_cot_hard_law.yaml").read_text(encoding="utf-8"))
    shown = Environment().from_string(task["doc_to_text"].partition("정답:")[0] + "정답: {{target}}")
    assert {shown.render(example) for example in task["fewshot_config"]["samples"]} < set(found)


def test_an_lm_eval_without_the_task_or_with_another_form_of_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(korean, "FOLDER", tmp_path)
    with pytest.raises(SettingError, match="^text: kmmlu has no text in it; allowed: "):
        open_text("kmmlu", 0)
    (tmp_path / "kmmlu_law.yaml").write_text("task: law")
    with pytest.raises(RunError, match=r"^text: .*kmmlu_law\.yaml can't be read \(KeyError"):
        open_text("kmmlu", 0)


def test_a_python_without_sources_has_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for folder in ("test", "site-packages", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("left out")
    (tmp_path / "_sysconfigdata_of_this_build.py").write_text("left out")
    with pytest.raises(SettingError, match="^text: stdlib has no text in it; allowed: "):
        open_text("stdlib", 0)
    (tmp_path / "module.py").write_text("kept\n")
    assert documents("stdlib") == ["kept"]
    (tmp_path / "module.py").write_bytes(b"# caf\xe9")
    with pytest.raises(RunError, match=r"^text: .*module\.py can't be read \("):
        open_text("stdlib", 0)


def test_batches_keep_the_order() -> None:
    stacked = list(batches([torch.tensor([at]) for at in range(5)], 2))
    assert [each[:, 0].tolist() for each in stacked] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "", "no text"),
        ("a.txt", " \n \n", "no text"),
        ("a.jsonl", '{"text": ""}\n', "no text"),
        ("a.txt", b"caf\xe9 au lait\n", "not UTF-8"),
        ("a.jsonl", '{"text": "a"}\nnonsense\n', "line 2"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b', "line 2"),
        ("a.jsonl", '{"body": "a"}\n', "line 1"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d"}\n', "line 2"),
    ],
)
def test_text_that_cannot_be_used_is_refused_on_one_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(SettingError) as caught:
        documents(path)
    line = str(caught.value)
    assert line.startswith("text: ")
    assert said in line
    assert "allowed: " in line
    assert "\n" not in line


def test_a_task_has_its_documents_in_the_order_of_the_file_and_reads_no_more_than_its_limit(tmp_path: Path) -> None:
    lines = [json.dumps({"text": str(number)}) for number in range(20)]
    path = written(tmp_path / "a.jsonl", "\n".join([*lines, "nonsense"]))
    assert text_documents(text=path, limit=20)["test"]["text"][:] == list(map(str, range(20)))
    assert len(text_documents(text=path, limit=3)["test"]) == 3
    with pytest.raises(SettingError, match="line 21"):
        text_documents(text=path)
    with pytest.raises(SettingError, match="line 21"):
        text_documents(text=path, limit=21)


def test_the_whole_of_c4_is_refused() -> None:
    with pytest.raises(SettingError, match="limit: None given with text=c4; allowed: a whole number"):
        text_documents(text="c4")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="text: .* is no file; allowed: "):
        open_text(str(tmp_path / "no.txt"), 0)


def test_without_a_hub_c4_says_what_needs_none() -> None:
    with pytest.raises(RunError, match="text=passages"):
        next(open_text("c4", 0).documents)
