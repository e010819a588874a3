"""Tokenizers that don't fit their model: refused in a line before anything is scored, or scored as lm-eval does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from chai_eval.calibration.settings import parse_analysis, parse_calibration
from chai_eval.cli import main
from chai_eval.cli.overrides import composed
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.models.builtin import byte_tokenizer
from chai_eval.scoring.fidelity import fidelities
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tokens import check_tokens

EMBEDDINGS = 100
ROW = {"goal": "open a jar", "sol1": "twist the lid", "sol2": "bake it", "label": 0}
# In the builtin tokenizer blanks come after the 94 printable characters, which have the ids 3 to 96.
BLANK = byte_tokenizer()(" ", add_special_tokens=False)["input_ids"][0]
SAID = f"model.tokenizer: token 'Ġ' has the id {BLANK}, but the model has {EMBEDDINGS} embeddings; allowed: "


def model_of(embeddings: int) -> PreTrainedModel:
    tokenizer = byte_tokenizer()
    changes = {"vocab_size": max(embeddings, len(tokenizer)), "num_hidden_layers": 2}
    model, _ = load_model("tiny_llama_random", device="cpu", config=changes)
    model.resize_token_embeddings(embeddings)
    return model


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model with fewer embeddings than the tokenizer that lies with it has tokens."""
    model_of(EMBEDDINGS).save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "piqa.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "data" / "text.txt").write_text("nought to see here")
    return tmp_path / "data"


def tokenizer_with(**special: str) -> PreTrainedTokenizerFast:
    """The builtin tokenizer's bytes, and no special tokens but these."""
    whole = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    whole["post_processor"] = None
    tokenizer = byte_tokenizer().backend_tokenizer.from_str(json.dumps(whole))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def asked(kind: str, *arguments: Sequence[Any]) -> Any:
    requests = [Instance(kind, {}, tuple(each), number) for number, each in enumerate(arguments)]
    return SimpleNamespace(task_name="some_task", task=SimpleNamespace(instances=requests))


def said(error: str) -> str:
    """The one line that isn't the progress of reading weights and documents."""
    (line,) = [line for line in error.splitlines() if line.strip() and "it/s]" not in line]
    return line


@pytest.mark.parametrize(
    "typed",
    [
        ["path={small}", "task=piqa", "data_dir={data}"],
        ["path={small}", "tokenizer=builtin", "task=[piqa,text]", "data_dir={data}", "text={data}/text.txt"],
        ["path={small}", "task=text", "text={data}/text.txt"],
        ["path={small}", "weights=random", "task=piqa", "data_dir={data}"],
        ["model=llama7b", "path={small}", "weights=random", "layers=1", "task=piqa", "data_dir={data}"],
    ],
    ids=str,
)
def test_a_token_without_an_embedding_is_one_line_before_anything_is_written(
    typed: list[str], small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each.format(small=small, data=data) for each in typed]
    assert main([*given, "method=mha", f"results_dir={tmp_path}/results"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert said(error).startswith(SAID)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("command", ["calibrate", "analyse"])
def test_so_it_is_in_the_text_that_a_model_is_calibrated_on(
    command: str, small: Path, data: Path, tmp_path: Path
) -> None:
    from chai_eval.analyse import analyse
    from chai_eval.calibrate import calibrate

    given = [f"path={small}", f"text={data}/text.txt", f"out={tmp_path}/out", "tokens=8", "samples=2"]
    values = composed(command, given)
    with pytest.raises(SettingError, match=f"^{SAID}"):
        if command == "calibrate":
            calibrate(parse_calibration(values), "command")
        else:
            analyse(parse_analysis(values), "command")
    assert not (tmp_path / "out").exists()


def test_so_it_is_in_texts_that_methods_are_compared_on() -> None:
    with pytest.raises(SettingError, match=f"^{SAID}"):
        fidelities(Runner(model_of(EMBEDDINGS), byte_tokenizer()), {"": build_method("mha")}, ["here it is"], tokens=8)


def test_a_measurement_needs_no_tokens_of_a_tokenizer(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["measure=latency", "measure.lengths=[8]", "measure.batch_sizes=[1]", "measure.new_tokens=2"]
    few = ["measure.repetitions=1", "measure.warmup=0", "method=mha", f"results_dir={tmp_path}/results"]
    assert main(["measure", f"path={small}", *grid, *few]) == 0
    assert "results " in capsys.readouterr().out


@pytest.mark.parametrize("embeddings", [EMBEDDINGS, 288])
def test_tokens_that_are_never_used_need_no_embedding(embeddings: int) -> None:
    """As few as are used, or more than there are tokens: log-likelihoods are stock lm-eval's."""
    model, tokenizer = model_of(embeddings), byte_tokenizer()
    pairs = [("abc", "de"), ("abc", "x"), ("q?", "no")]
    check_tokens(model, tokenizer, [asked("loglikelihood", *pairs)])
    requests = asked("loglikelihood", *pairs).task.instances
    stock = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=1).loglikelihood(requests, disable_tqdm=True)
    mha = build_method("mha")
    with mha.applied(model):
        ours = PackedLM(Runner(model, tokenizer, 64, progress=False), mha).loglikelihood(requests)
    # float32, logits of order 10, sums of at most two tokens.
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in stock], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("loglikelihood", ("ab", "c d")),
        ("loglikelihood", ("a b", "cd")),
        ("loglikelihood_rolling", ("ab d",)),
        ("generate_until", ("a b", {"until": ["\n"], "max_gen_toks": 4})),
    ],
)
def test_the_token_is_found_wherever_it_stands(kind: str, arguments: tuple[Any, ...]) -> None:
    model, tokenizer = model_of(EMBEDDINGS), byte_tokenizer()
    with pytest.raises(SettingError, match=f"^{SAID}"):
        check_tokens(model, tokenizer, [asked(kind, arguments)])


def test_a_token_that_only_a_template_puts_before_a_text_is_found() -> None:
    model, tokenizer = model_of(288), byte_tokenizer()
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    whole["post_processor"]["special_tokens"]["<s>"]["ids"] = [300]
    odd = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer.from_str(json.dumps(whole)), bos_token="<s>", eos_token="</s>"
    )
    with pytest.raises(SettingError, match=r"^model\.tokenizer: token .* has the id 300, but the model has 288 embed"):
        check_tokens(model, odd, [asked("loglikelihood", ("a", "b"))])


def test_a_token_named_in_the_config_that_the_vocabulary_lacks_is_found_where_it_is_used() -> None:
    model, odd = model_of(259), tokenizer_with(bos_token="<begin>", eos_token="</s>")
    assert odd.bos_token_id == 259
    check_tokens(model, odd, [asked("loglikelihood", ("a", "b"))])
    with pytest.raises(
        SettingError, match=r"^model\.tokenizer: token '<begin>' has the id 259, but the model has 259 "
    ):
        check_tokens(model, odd, [asked("loglikelihood_rolling", ("a",))])


def test_padding_without_an_embedding_changes_no_text_that_is_written() -> None:
    model = model_of(259)
    requests = asked(
        "generate_until", *[(text, {"until": ["\n"], "max_gen_toks": 6}) for text in ("a", "a longer one", "b c")]
    )
    chosen = build_method("chai", clusters=[8, 3])
    texts = []
    for special in ({"pad_token": "<pad>"}, {"pad_token": "<padding>"}, {}):
        odd = tokenizer_with(eos_token="</s>", **special)
        check_tokens(model, odd, [requests])
        with chosen.applied(model):
            ours = PackedLM(Runner(model, odd, 64, progress=False), chosen)
            texts.append(ours.generate_until(requests.task.instances))
    assert texts[0] == texts[1] == texts[2]
    assert any(texts[0])


@pytest.mark.parametrize("special", [{"bos_token": "<s>"}, {"eos_token": "</s>"}])
def test_one_of_bos_and_eos_is_enough_to_score_as_lm_eval_does(special: dict[str, str]) -> None:
    model = model_of(288)
    pairs = [("abc", "de"), ("", "x")]
    texts = [("some text",)]
    for kind, arguments in (("loglikelihood", pairs), ("loglikelihood_rolling", texts)):
        requests = asked(kind, *arguments)
        check_tokens(model, tokenizer_with(**special), [requests])
        stock = HFLM(pretrained=model, tokenizer=tokenizer_with(**special), batch_size=1)
        mha = build_method("mha")
        with mha.applied(model):
            ours = PackedLM(Runner(model, tokenizer_with(**special), 64, progress=False), mha)
            found = getattr(ours, kind)(requests.task.instances)
        expected = getattr(stock, kind)(requests.task.instances, disable_tqdm=True)
        assert torch.tensor(found).flatten().tolist() == pytest.approx(
            torch.tensor(expected).flatten().tolist(), abs=1e-4
        )


def test_a_tokenizer_with_neither_bos_nor_eos_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of(288).save_pretrained(tmp_path / "nameless")
    tokenizer_with(pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path / "nameless")
    given = [
        f"path={tmp_path}/nameless",
        "method=mha",
        "task=piqa",
        f"data_dir={data}",
        f"results_dir={tmp_path}/results",
    ]
    assert main(given) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert said(error).startswith("model.tokenizer: it has neither a BOS nor an EOS token")
    assert "allowed: a tokenizer with bos_token or eos_token" in error
    assert not (tmp_path / "results").exists()


def test_a_text_needs_an_eos_token_to_end_with() -> None:
    model, odd = model_of(288), tokenizer_with(bos_token="<s>")
    with pytest.raises(
        SettingError, match=r"^model\.tokenizer: it has no EOS token, which ends a text that some_task "
    ):
        check_tokens(model, odd, [asked("generate_until", ("a", {"until": ["\n"]}))])
