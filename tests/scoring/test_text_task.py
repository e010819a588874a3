"""The task `text` against lm-eval's own wikitext task under its own HFLM, on the same documents."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from chai_eval.errors import RunError, SettingError
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.resources import tasks_dir
from chai_eval.scoring.evaluate import score
from chai_eval.scoring.prepare import prepare
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tasks import check_text, load_task, primary_metric, task_names
from chai_eval.settings import TaskSettings
from chai_eval.store.record import write_record
from tests.scoring.test_task_fidelity import METHODS as LIKEWISE

METRICS = ("byte_perplexity", "bits_per_byte")
POSITIONS = 64
# Of one window and of several; nothing that wikitext's own clean-up would change.
TEXTS = ["A few words", "Some more words, and a line end\nin between", "Far too many words for one window. " * 9]
METHODS = {"mha": {}, **LIKEWISE}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load_model("tiny_llama_random", device="cpu", config={"max_position_embeddings": POSITIONS})


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    return str(path)


def wikitext() -> ConfigurableTask:
    """lm-eval's own task file over our documents, without the hub."""
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "wikitext.yaml")
    config = {key: value for key, value in config.items() if not key.startswith(("dataset_", "training_", "valid"))}
    rows = datasets.Dataset.from_dict({"page": TEXTS})
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: {"test": rows}})


def test_every_document_and_every_metric_equal_those_of_stock_lm_eval(tiny: tuple[Any, Any], text: str) -> None:
    model, tokenizer = tiny
    task = load_task("text", TaskSettings(text=text))
    ours = score(Runner(model, tokenizer, progress=False), build_method("mha"), prepare(task, limit=None, seed=1))
    assert ours is not None
    theirs = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2),
        tasks=[wikitext()],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(theirs["samples"]["wikitext"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ours.samples) == len(TEXTS)
    for metric in METRICS:
        stock = np.array([sample[metric] for sample in samples])
        found = np.array([json.loads(each) for each in ours.samples[metric]])
        np.testing.assert_array_equal(found[:, 1], stock[:, 1])
        # float32; sums over up to 300 tokens.
        np.testing.assert_allclose(found[:, 0], stock[:, 0], rtol=1e-5)
        value = theirs["results"]["wikitext"][f"{metric},none"]
        assert math.log(ours.metrics[metric]["value"]) == pytest.approx(math.log(value), rel=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_under_every_method_a_text_has_the_score_of_its_windows_alone(
    tiny: tuple[Any, Any], text: str, name: str
) -> None:
    """Stock `HFLM`, a window at a time without padding, with the method put into its model."""
    model, tokenizer = tiny
    method = build_method(name, **METHODS[name])
    prepared = prepare(load_task("text", TaskSettings(text=text)), limit=None, seed=1)
    ours = score(Runner(model, tokenizer, progress=False), method, prepared)
    assert ours is not None
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    with method.applied(model):
        expected = stock.loglikelihood_rolling(prepared.task.instances, disable_tqdm=True)
    found = [json.loads(each)[0] for each in ours.samples["byte_perplexity"]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_text_with_few_spaces_has_a_perplexity_and_a_record_as_any_other(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    """Per word it would be beyond what a float holds."""
    path = tmp_path / "a.txt"
    path.write_text("注意力头" * 125, encoding="utf-8")
    prepared = prepare(load_task("text", TaskSettings(text=str(path))), limit=None, seed=1)
    scored = score(Runner(*tiny, progress=False), build_method("mha"), prepared)
    assert scored is not None
    ((likelihood, units),) = (json.loads(each) for each in scored.samples["byte_perplexity"])
    assert units == 1500
    assert -likelihood > math.log(sys.float_info.max)  # the text is one word
    assert scored.metrics["byte_perplexity"]["value"] == pytest.approx(math.exp(-likelihood / units))
    write_record(tmp_path / "result", {"n_documents": 1, "metrics": scored.metrics}, scored.samples)


def test_its_file_says_what_wikitexts_says_but_for_the_documents_and_words() -> None:
    ours = load_yaml(tasks_dir() / "text.yaml")
    stock = load_yaml(Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "wikitext.yaml")
    assert ours["output_type"] == stock["output_type"]
    metrics = [each["metric"] for each in ours["metric_list"]]
    assert ["word_perplexity", *metrics] == [each["metric"] for each in stock["metric_list"]]
    assert primary_metric("text") == metrics[0] == "byte_perplexity"
    assert task_names(["piqa", "text"]) == ["piqa", "text"]


def test_the_content_of_the_file_is_part_of_the_prompts_and_its_place_is_not(text: str, tmp_path: Path) -> None:
    def hashes(path: Path | str) -> tuple[str, str]:
        prepared = prepare(load_task("text", TaskSettings(text=str(path))), limit=None, seed=1)
        return prepared.prompts_hash, prepared.config_hash

    moved, changed = tmp_path / "moved.jsonl", tmp_path / "changed.jsonl"
    moved.write_text(Path(text).read_text())
    changed.write_text(Path(text).read_text().replace("few", "two"))
    assert hashes(moved) == hashes(text)
    assert hashes(changed)[0] != hashes(text)[0]
    dumped = json.dumps(load_task("text", TaskSettings(text=text, limit=2)).dump_config(), default=str)
    assert str(tmp_path) not in dumped
    assert '"limit"' not in dumped


def test_its_file_works_in_lm_eval_itself(text: str) -> None:
    manager = TaskManager(include_path=str(tasks_dir()), include_defaults=False, metadata={"text": text})
    assert manager.load("text")["tasks"]["text"].eval_docs["text"][:] == TEXTS


def test_it_reads_no_more_documents_than_its_limit(text: str) -> None:
    assert load_task("text", TaskSettings(text=text, limit=2)).eval_docs["text"][:] == TEXTS[:2]


@pytest.mark.parametrize(("names", "given"), [(["piqa", "text"], None), (["piqa"], "passages")])
def test_the_task_and_its_text_are_given_together_or_not_at_all(names: list[str], given: str | None) -> None:
    with pytest.raises(SettingError, match=r"^text: .* given with(out)? task=text; allowed: "):
        check_text(names, given)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "no text"), (b"caf\xe9", "not UTF-8"), (b'{"text": "a"}\n{"text": 3}\n', "line 2")],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=rf"^text: .*{said}") as caught:
        load_task("text", TaskSettings(text=str(path)))
    assert "\n" not in str(caught.value)


def test_text_that_the_model_rules_out_has_no_perplexity_and_one_line_says_so(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    (tmp_path / "a.txt").write_text("One passage of words.\n\nAnother.\n")
    prepared = prepare(load_task("text", TaskSettings(text=str(tmp_path / "a.txt"))), limit=None, seed=1)
    (*_, letter) = tokenizer("w")["input_ids"]
    gone = torch.tensor(letter)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, gone, -math.inf))
    with pytest.raises(RunError, match=r"^text: byte_perplexity of these documents is inf: the model rules out"):
        score(Runner(model, tokenizer, progress=False), build_method("mha"), prepared)
