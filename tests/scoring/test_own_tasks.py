"""Task files of one's own: found by name, never run Python unasked, and all that they say is part of the key."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from chai_eval.cli import main
from chai_eval.errors import RunError, SettingError
from chai_eval.scoring.own_tasks import sandboxed_templates
from chai_eval.scoring.prepare import prepare
from chai_eval.scoring.tasks import load_task, task_names
from chai_eval.settings import TaskSettings
from chai_eval.task_settings import IncludedTasks
from tests.scoring.own_folder import write_folder, write_lines

ESCAPE = "{{ question.__class__.__mro__[1].__subclasses__() | length }}"
HELPERS = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()

def ask(doc):
    return doc["question"].upper()

def first(doc, results):
    return {"exact_match": helped(results[0])}

def helped(text):
    return float(len(text))

def pick(documents):
    return documents.select(range(2))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "my tasks=old")


def included(*folders: Path, code: bool = False) -> IncludedTasks:
    return IncludedTasks(folders, code)


def add(folder: Path, name: str, text: str, base: str = "own_choice.yaml") -> None:
    (folder / f"{name}.yaml").write_text(f"include: {base}\ntask: {name}\n{text}\n")


def key_parts(name: str, *folders: Path, code: bool = False) -> tuple[str, str]:
    prepared = prepare(load_task(name, TaskSettings(included=included(*folders, code=code))), limit=None, seed=1)
    return prepared.prompts_hash, prepared.config_hash


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("own_choice", ["own_choice"]),
        ("own_tag", ["own_choice", "own_rolling", "own_text"]),
        ("own_group", ["own_text", "own_choice", "own_rolling"]),
        (["piqa", "own_text"], ["piqa", "own_text"]),
    ],
)
def test_tasks_tags_and_groups_of_the_folder_go_by_their_names(choice: Any, names: list[str], folder: Path) -> None:
    assert task_names(choice, included(folder)) == names


def test_lm_evals_own_tasks_may_be_members_of_a_group_of_the_folder(folder: Path) -> None:
    (folder / "mixed.yaml").write_text("group: mixed\ntask: [own_text, piqa, winogrande]\n")
    assert task_names("mixed", included(folder)) == ["own_text", "piqa", "winogrande"]


def test_a_name_of_the_papers_in_the_folder_goes_first_and_in_the_last_folder_before_all(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for place, count in zip(folders, (3, 4), strict=True):
        write_folder(place, scored=count)
        add(place, "piqa", "")
    assert len(load_task("piqa", TaskSettings(source="local", included=included(*folders))).eval_docs) == 4
    assert len(load_task("piqa", TaskSettings(included=included(*reversed(folders)))).eval_docs) == 3


@pytest.mark.parametrize("name", ["paper", "text"])
def test_a_name_that_stands_for_something_else_here_is_refused(name: str, folder: Path) -> None:
    add(folder, name, "")
    with pytest.raises(SettingError, match=rf"^include_path: .*{name}.yaml is called {name}; allowed: any name but"):
        task_names(name, included(folder))


def test_an_unknown_name_says_which_file_could_not_be_read(folder: Path) -> None:
    (folder / "broken.yaml").write_text("task: broken\n  doc_to_text: [\n")
    with pytest.raises(SettingError, match=r"^task: 'brokn' is not known.* own_choice.*") as raised:
        task_names("brokn", included(folder))
    assert "broken.yaml can't be read: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_documents_that_are_not_there_are_one_line(folder: Path) -> None:
    (folder / "test.jsonl").unlink()
    with pytest.raises(RunError, match=r"^task: own_choice of .*own_choice.yaml can't be loaded \(FileNotFoundError"):
        load_task("own_choice", TaskSettings(included=included(folder)))


@pytest.fixture(autouse=True)
def no_report_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval makes one after every task, with pip, for seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


CODE = {
    "a function of its own": ("doc_to_text: !function helpers.ask", "own_choice.yaml"),
    "a function deep inside": (
        "fewshot_config: {sampler: default, doc_to_text: !function helpers.ask}",
        "own_choice.yaml",
    ),
    "a function in a list": ("metric_list: [{metric: !function helpers.helped}]", "own_choice.yaml"),
    "a verbatim tag": ("doc_to_text: !<!function> helpers.ask", "own_choice.yaml"),
    "a function of any module": ("process_docs: !function os.system", "own_choice.yaml"),
    "a class": ("class: !function helpers.Mine", "own_choice.yaml"),
    "documents": ("custom_dataset: !function helpers.documents", "own_choice.yaml"),
    "a function of the file it includes": ("", "below/base.yaml"),
    "a metric of the library evaluate": ("metric_list: [{metric: helpers.py}]", "own_text.yaml"),
    "a metric of that library by lm-eval's name": ("metric_list: [{metric: f1, hf_evaluate: true}]", "own_text.yaml"),
}


@pytest.mark.parametrize("kind", CODE)
def test_nothing_that_would_run_python_is_loaded_unless_allowed(kind: str, folder: Path) -> None:
    text, base = CODE[kind]
    for place in (folder, folder / "below"):
        place.mkdir(exist_ok=True)
        (place / "helpers.py").write_text(HELPERS)
    (folder / "below" / "base.yaml").write_text("include: ../own_choice.yaml\nprocess_docs: !function helpers.pick\n")
    add(folder, "with_code", text, base)
    with pytest.raises(SettingError, match=r"^include_code: False given, and .* runs .*; allowed: true, if") as raised:
        load_task("with_code", TaskSettings(included=included(folder)))
    assert ("base.yaml" if "below" in base else "with_code.yaml") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(folder.rglob("*.ran")) == []


def test_python_runs_where_it_is_allowed(folder: Path) -> None:
    (folder / "helpers.py").write_text(HELPERS)
    add(folder, "with_code", "doc_to_text: !function helpers.ask\nprocess_docs: !function helpers.pick")
    task = load_task("with_code", TaskSettings(included=included(folder, code=True)))
    prepared = prepare(task, limit=None, seed=1)
    assert prepared.n_documents == 2
    assert task.doc_to_text({"question": "why"}) == "WHY"


def test_a_class_of_ones_own_is_a_task(folder: Path) -> None:
    (folder / "helpers.py").write_text(
        "from lm_eval.api.task import ConfigurableTask\n"
        "class Mine(ConfigurableTask):\n"
        "    def doc_to_text(self, doc, doc_to_text=None):\n"
        "        return 'mine'\n"
    )
    # `class` is not a setting of a task, and lm-eval's own constructor refuses it.
    (folder / "helpers.py").write_text(
        (folder / "helpers.py").read_text()
        + "    def __init__(self, config=None):\n"
        + "        super().__init__(config={k: v for k, v in config.items() if k != 'class'})\n"
    )
    add(folder, "with_class", "class: !function helpers.Mine")
    prepared = prepare(load_task("with_class", TaskSettings(included=included(folder, code=True))), limit=None, seed=1)
    assert {each.args[0] for each in prepared.task.instances} == {"Complete the sentence.\n\nmine"}


def test_lm_evals_own_functions_need_no_leave_also_where_a_file_includes_them(folder: Path) -> None:
    stock = Path(lm_eval.__file__).parent / "tasks" / "winogrande" / "default.yaml"
    write_lines(folder / "rows.jsonl", [{"sentence": "A _ b", "option1": "x", "option2": "y", "answer": "1"}])
    data = (
        f"dataset_path: json\ndataset_name: null\ndataset_kwargs: {{data_files: {{validation: {folder}/rows.jsonl}}}}"
    )
    add(folder, "mine", f"training_split: null\n{data}", str(stock))
    assert len(load_task("mine", TaskSettings(included=included(folder))).eval_docs) == 1


def test_a_template_reaches_nothing_of_python(folder: Path) -> None:
    add(folder, "escapes", f'doc_to_text: "{ESCAPE}"')
    with pytest.raises(RunError, match=r"^task: escapes of .*reaches into Python, .* access to attribute '__class__'"):
        load_task("escapes", TaskSettings(included=included(folder)))
    add(folder, "escapes_later", f'doc_to_text: "{{% if answer == {second_answer(folder)} %}}{ESCAPE}{{% endif %}}x"')
    task = load_task("escapes_later", TaskSettings(included=included(folder)))
    with pytest.raises(RunError, match="reaches into Python, .*unsafe"):
        prepare(task, limit=None, seed=1)


def second_answer(folder: Path) -> int:
    """An answer that the first document, which lm-eval tries as it loads, doesn't have."""
    answers = [json.loads(line)["answer"] for line in (folder / "test.jsonl").read_text().splitlines()]
    return next(answer for answer in answers if answer != answers[0])


def test_templates_give_in_the_sandbox_what_they_give_outside() -> None:
    from lm_eval import utils

    doc = {"question": " why? ", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answer": "B", "n": [3, 1]}
    templates = [
        "{{question.strip()}}{{choices.text}}",
        "{{choices['label'].index(answer)}}{{n|sort|join(',')}}",
        "{% set x = [] %}{% for i in range(2) %}{{ x.append(i) }}{% endfor %}{{ '%s-%d'|format(answer, 3) }}",
        "{{ question|regex_replace('w', 'W') }}{{ 'x{}'.format(answer) }}\n",
    ]
    outside = [utils.apply_template(template, doc) for template in templates]
    before = utils.env
    with sandboxed_templates():
        assert [utils.apply_template(template, doc) for template in templates] == outside
    assert utils.env is before


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("helpers.py", lambda text: text.replace("float(len(text))", "1.0")),
        ("below/far.py", lambda text: text + "X = 2\n"),
        ("with_code.yaml", lambda text: text.replace("repeats: 1", "repeats: 2")),
        ("own_choice.yaml", lambda text: text.replace("Complete", "Finish")),
        ("test.jsonl", lambda text: text.replace('"answer": ', '"answer":  ', 1).replace(" the ", " a ", 1)),
        ("train.jsonl", lambda text: text.replace(" the ", " a ")),
    ],
)
def test_every_file_that_can_change_a_score_changes_what_the_key_is_made_of(
    file: str, change: Any, folder: Path
) -> None:
    (folder / "below").mkdir()
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "below" / "far.py").write_text("X = 1\n")
    add(folder, "with_code", "process_results: !function helpers.first\nnum_fewshot: 9\nrepeats: 1", "own_text.yaml")
    before = key_parts("with_code", folder, code=True)
    assert key_parts("with_code", folder, code=True) == before
    text = (folder / file).read_text()
    assert change(text) != text
    (folder / file).write_text(change(text))
    assert key_parts("with_code", folder, code=True) != before


def test_the_key_of_a_task_with_functions_does_not_depend_on_where_they_lie_in_memory(folder: Path) -> None:
    (folder / "helpers.py").write_text(HELPERS)
    add(folder, "with_code", "process_docs: !function helpers.pick\ndoc_to_text: !function helpers.ask")
    tasks = []
    for seconds in (1, 2):
        os.utime(folder / "helpers.py", (seconds, seconds))  # for which lm-eval imports it again
        tasks.append(load_task("with_code", TaskSettings(included=included(folder, code=True))))
    assert tasks[0].config.process_docs is not tasks[1].config.process_docs
    first, second = (prepare(task, limit=None, seed=1).config_hash for task in tasks)
    assert first == second


def test_a_whole_run_on_a_folder_of_ones_own_and_a_sweep_over_examples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "second")
    typed = ["model=tiny_llama_random", "device=cpu", "limit=2", f"include_path={folder}", "task=own_text"]
    assert main(["-m", *typed, "num_fewshot=0,1", "system_instruction=Be kind, and brief."]) == 0
    capsys.readouterr()
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("results/*/own_text/*/record.json"))]
    assert {(each["method"], each["config"]["num_fewshot"]) for each in found} == {
        *(("mha", 0), ("mha", 1), ("chai", 0), ("chai", 1))
    }
    assert len({each["key"] for each in found}) == 4
    assert {each["config"]["system_instruction"] for each in found} == {"Be kind, and brief."}
    assert main(["status"]) == 0
    assert "num_fewshot 1, system_instruction Be kind, and brief." in capsys.readouterr().out
    again = [f"include_path=[second,'{folder}']" if each.startswith("include_path") else each for each in typed]
    assert main([*again, "num_fewshot=1", "system_instruction=Be kind, and brief.", "task=own_choice"]) == 0
    assert "num_fewshot 1, system_instruction Be kind, and brief." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("include_path=/no/such", "include_path: '/no/such' given; allowed: a folder with task files"),
        ("include_path=[]x", "include_path: "),
        ("include_path=[3]", "include_path: '3' given; allowed: a folder with task files"),
        ("include_code=yes", "include_code: 'yes' given; allowed: true, false"),
        ("num_fewshot=-1", "num_fewshot: -1 given; allowed: a whole number from 0 up, or null"),
        ("num_fewshot=few", "num_fewshot: 'few' given"),
        ("apply_chat_template=", "apply_chat_template: '' given; allowed: true, false, or the name"),
        ("apply_chat_template=1", "apply_chat_template: 1 given; allowed: true, false, or the name"),
        ("fewshot_as_multiturn=true", "fewshot_as_multiturn: True given; allowed: null, false, or true with"),
        ("fewshot_as_multiturn=some", "fewshot_as_multiturn: 'some' given"),
        ("system_instruction=", "system_instruction: '' given"),
        ("model=tiny_llama_random apply_chat_template=true task=text text=passages", "apply_chat_template: True given"),
    ],
)
def test_a_wrong_setting_is_one_line_and_nothing_is_written(
    typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(said)
    assert list(tmp_path.iterdir()) == []
