"""Tasks of one's own and lm-eval's, with examples and chat templates: every prompt and score equals stock lm-eval's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.scoring.evaluate import score
from chai_eval.scoring.fidelity import first_requests, task_fidelity
from chai_eval.scoring.prepare import PreparedTask, prepare
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tasks import load_task
from chai_eval.scoring.tokens import request_tokens
from chai_eval.session import Session
from chai_eval.settings import TaskSettings
from chai_eval.task_settings import IncludedTasks, PromptSettings
from tests.scoring.own_folder import write_folder

SEED = 7
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
OTHER = PLAIN.replace("<", "[").replace(">", "]")

SETTINGS = {
    "as it is": {},
    "examples": {"num_fewshot": 2},
    "system": {"system_instruction": "Be brief. "},
    "chat": {"apply_chat_template": True},
    "multiturn": {"apply_chat_template": True, "num_fewshot": 2, "system_instruction": "Be brief."},
    "one turn": {"apply_chat_template": True, "num_fewshot": 2, "fewshot_as_multiturn": False},
}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    tokenizer.chat_template = PLAIN
    return model, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def no_report_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval makes one after every task, with pip, for seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def own(name: str, folder: Path) -> Callable[[], Any]:
    return lambda: load_task(name, TaskSettings(included=IncludedTasks((folder,))))


def arithmetic(count: int, seed: int) -> datasets.Dataset:
    """Rows in the columns of gsm8k."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(count)]
    return datasets.Dataset.from_list(
        [{"question": f"What is {a} and {b}?", "answer": f"{a} + {b}\n#### {a + b}"} for a, b in pairs]
    )


def science(count: int, seed: int) -> datasets.Dataset:
    """Rows in the columns of ARC."""
    draw = random.Random(seed)
    words = ["rock", "tree", "salt", "ice", "moss", "fog"]
    rows = []
    for number in range(count):
        choices = {"text": draw.sample(words, 4), "label": list("ABCD")}
        rows.append({"id": str(number), "question": f"Which is {number}?", "choices": choices, "answerKey": "B"})
    return datasets.Dataset.from_list(rows)


def of_lm_eval(path: str, rows: Callable[[int, int], datasets.Dataset]) -> Callable[[], Any]:
    """lm-eval's own task file over local rows, with a training split of their own."""

    def made() -> ConfigurableTask:
        config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / path)
        config = {key: value for key, value in config.items() if key not in ("tag", "dataset_path", "dataset_name")}
        splits = {"train": rows(9, 1), "validation": rows(6, 3), "test": rows(4, 2)}
        shorter = {"generation_kwargs": {**config["generation_kwargs"], "max_gen_toks": 16}} if "gsm8k" in path else {}
        return ConfigurableTask(config={**config, **shorter, "custom_dataset": lambda **_: splits})

    return made


TASKS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "own_choice": lambda folder: own("own_choice", folder),
    "own_text": lambda folder: own("own_text", folder),
    "arc_easy": lambda _: of_lm_eval("arc/arc_easy.yaml", science),
    "gsm8k": lambda _: of_lm_eval("gsm8k/gsm8k.yaml", arithmetic),
}


def stock(tiny: tuple[Any, Any], task: Any, manager: TaskManager | None = None, **settings: Any) -> Any:
    """lm-eval by itself, one request at a time."""
    model, tokenizer = tiny
    return simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=[task],
        task_manager=manager or TaskManager(include_defaults=False),
        bootstrap_iters=0,
        random_seed=SEED,
        numpy_random_seed=SEED,
        torch_random_seed=SEED,
        fewshot_random_seed=SEED,
        **settings,
    )


def assert_equal(ours: Any, prepared: PreparedTask, theirs: Any) -> None:
    name = prepared.task_name
    samples = sorted(theirs["samples"][name], key=lambda each: each["doc_id"])
    assert [[list(args) for args in each["arguments"]] for each in _first_filter(samples)] == [
        [list(each.args) for each in prepared.task.instances if each.doc_id == document]
        for document in range(prepared.n_documents)
    ]
    for sample, (_, row) in zip(samples, ours.samples.iterrows(), strict=True):
        assert (sample["doc_hash"], sample["prompt_hash"]) == (row.doc_hash, row.prompt_hash)
        if "responses" in row:
            assert row.responses == sample["filtered_resps"]
        else:
            # float32; a choice of twenty tokens sums twenty roundings of about 1e-5.
            np.testing.assert_allclose(row.loglikelihoods, [each[0][0] for each in sample["resps"]], atol=5e-4, rtol=0)
        assert all(row[metric] == sample[metric] for metric in sample["metrics"])
    for metric, found in ours.metrics.items():
        key = metric.replace(" (", ",").rstrip(")") if "(" in metric else f"{metric},none"
        assert found["value"] == theirs["results"][name][key]


def _first_filter(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in samples if each["filter"] == samples[0]["filter"]]


@pytest.mark.parametrize("given", SETTINGS)
@pytest.mark.parametrize("name", TASKS)
def test_prompts_and_scores_equal_those_of_stock_lm_eval(
    tiny: tuple[Any, Any], folder: Path, name: str, given: str
) -> None:
    load, settings = TASKS[name](folder), SETTINGS[given]
    prepared = prepare(load(), limit=None, seed=SEED, prompts=PromptSettings(**settings), tokenizer=tiny[1])
    ours = score(Runner(*tiny, progress=False), build_method("mha"), prepared)
    assert_equal(ours, prepared, stock(tiny, load(), **settings))


def test_a_task_of_ones_own_equals_lm_eval_told_its_folder_and_name(tiny: tuple[Any, Any], folder: Path) -> None:
    prompts = PromptSettings(num_fewshot=3)
    prepared = prepare(own("own_choice", folder)(), limit=3, seed=SEED, prompts=prompts)
    ours = score(Runner(*tiny, progress=False), build_method("mha"), prepared)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    assert_equal(ours, prepared, stock(tiny, "own_choice", manager, limit=3, num_fewshot=3))


def test_a_template_of_several_is_taken_by_its_name(tiny: tuple[Any, Any], folder: Path) -> None:
    model, tokenizer = tiny
    several = load_model("tiny_llama_random", device="cpu")[1]
    several.chat_template = {"default": PLAIN, "other": OTHER}
    prompts = PromptSettings(apply_chat_template="other")
    prepared = prepare(own("own_text", folder)(), limit=None, seed=SEED, prompts=prompts, tokenizer=several)
    tokenizer.chat_template = OTHER
    try:
        theirs = stock(tiny, own("own_text", folder)(), apply_chat_template=True)
    finally:
        tokenizer.chat_template = PLAIN
    assert_equal(score(Runner(model, several, progress=False), build_method("mha"), prepared), prepared, theirs)


@pytest.mark.parametrize("name", ["own_choice", "own_text"])
def test_fidelity_reads_the_tokens_that_are_scored_through_a_chat_template(
    tiny: tuple[Any, Any], folder: Path, name: str
) -> None:
    prompts = PromptSettings(num_fewshot=1, apply_chat_template=True)
    prepared = prepare(own(name, folder)(), limit=None, seed=SEED, prompts=prompts, tokenizer=tiny[1])
    asked = first_requests(prepared)
    for request, tokens in zip(asked, request_tokens(*tiny, asked), strict=True):
        prompt = request.args[0]
        text = prompt + (request.args[1] if name == "own_choice" else "")
        # The template writes the first token itself: it is there once.
        assert list(tokens) == tiny[1](text, add_special_tokens=False)["input_ids"]
    found = task_fidelity(Runner(*tiny, progress=False), build_method("chai", clusters=[[2, 4]]), prepared, 3)
    assert found is not None
    assert found.sequences == 3
    assert found.divergence.value > 0


def settings_of(folder: Path, **prompts: Any) -> TaskSettings:
    return TaskSettings(included=IncludedTasks((folder,)), prompts=PromptSettings(**prompts))


def test_a_session_keeps_tasks_with_other_prompts_apart(folder: Path) -> None:
    session, hashes, asked = Session(), [], []
    for turn in range(2):
        for count in (0, 1, 2):
            prepared = session.prepared("own_choice", settings_of(folder, num_fewshot=count), SEED)
            hashes.append((prepared.prompts_hash, prepared.config_hash))
            asked.append([each.args for each in prepared.task.instances])
            alone = prepare(own("own_choice", folder)(), limit=None, seed=SEED, prompts=PromptSettings(count))
            assert hashes[-1] == (alone.prompts_hash, alone.config_hash), turn
            assert prepared.task.config.num_fewshot == count
    assert len(set(hashes)) == 3
    assert asked[:3] == asked[3:]


def test_a_session_takes_the_chat_template_of_the_model_at_hand(folder: Path) -> None:
    session, found = Session(), []
    for template in (PLAIN, OTHER, PLAIN):
        loaded = type("Loaded", (), {"tokenizer": load_model("tiny_llama_random", device="cpu")[1]})
        loaded.tokenizer.chat_template = template
        prepared = session.prepared("own_choice", settings_of(folder, apply_chat_template=True), SEED, loaded)
        found.append(prepared.prompts_hash)
    assert found[0] == found[2] != found[1]


CHANGES = {name: settings for name, settings in SETTINGS.items() if settings}


@pytest.mark.parametrize("given", CHANGES)
def test_what_changes_a_prompt_changes_what_the_key_is_made_of(tiny: tuple[Any, Any], folder: Path, given: str) -> None:
    before, after = (
        prepare(own("own_choice", folder)(), limit=None, seed=SEED, prompts=PromptSettings(**each), tokenizer=tiny[1])
        for each in ({}, CHANGES[given])
    )
    assert before.prompts_hash != after.prompts_hash


def test_a_task_that_allows_no_examples_keeps_to_it_and_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "none.yaml").write_text(f"include: {folder}/own_choice.yaml\ntask: none\nnum_fewshot: 0\n")
    task = load_task("none", TaskSettings(included=IncludedTasks((tmp_path,))))
    prepared = [prepare(task, limit=None, seed=SEED, prompts=PromptSettings(count)) for count in (None, 2)]
    assert prepared[0].prompts_hash == prepared[1].prompts_hash
    assert prepared[0].config_hash == prepared[1].config_hash
    assert "num_fewshot stays 0" in caplog.text


def test_a_papers_task_of_local_files_never_has_the_document_at_hand_among_its_examples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    science(4, 5).to_json(tmp_path / "arc_easy.jsonl")
    prompts = PromptSettings(num_fewshot=3)
    prepared = prepare(load_task("arc_easy", TaskSettings(data_dir=tmp_path)), limit=None, seed=SEED, prompts=prompts)
    for request in prepared.task.instances:
        assert request.args[0].count(f"Question: {request.doc['question']}") == 1
    assert "drawn from the documents that are scored, but for the one at hand" in caplog.text
    with pytest.raises(SettingError, match=r"^num_fewshot: 4 given, and arc_easy has 3 documents .*allowed: 0 to 3$"):
        task = load_task("arc_easy", TaskSettings(data_dir=tmp_path))
        prepare(task, limit=None, seed=SEED, prompts=PromptSettings(4))


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (None, {}, r"^apply_chat_template: True given; allowed: false, as the tokenizer of this model has no chat"),
        (PLAIN, {"apply_chat_template": "chatml"}, r"^apply_chat_template: 'chatml' given; allowed: false, true, def"),
        ({"a": PLAIN, "b": PLAIN}, {}, r"^apply_chat_template: True given; allowed: false, a, b$"),
        (
            NO_SYSTEM,
            {"system_instruction": "Hi"},
            r"^system_instruction: given, and the chat template .*allowed: null$",
        ),
    ],
)
def test_a_chat_template_that_is_not_there_is_one_line(
    folder: Path, template: Any, settings: dict[str, Any], message: str
) -> None:
    tokenizer = load_model("tiny_llama_random", device="cpu")[1]
    tokenizer.chat_template = template
    prompts = PromptSettings(**{"apply_chat_template": True, **settings})
    with pytest.raises(SettingError, match=message) as raised:
        prepare(own("own_choice", folder)(), limit=None, seed=SEED, prompts=prompts, tokenizer=tokenizer)
    assert "\n" not in str(raised.value)
