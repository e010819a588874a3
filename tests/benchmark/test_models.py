"""Methods at settings that change nothing, on small models of several types, beside the stock models; and the judge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.benchmark.models import command, verdict
from chai_eval.benchmark.models.build import kinds, small_model
from chai_eval.benchmark.models.compare import METHODS, MODES, reference
from chai_eval.benchmark.models.page import page
from chai_eval.benchmark.models.sweep import sweep
from chai_eval.benchmark.models.verdict import FAILED, REFUSED, RIGHT, UNBUILT, WRONG, Outcome, Verdict, judge, outcome
from chai_eval.methods import Method, build_method
from chai_eval.methods.mha import MHA

# What bounds how far each looks back: nothing, a window told to the attention call, windows and chunks that only the
# mask holds.
KINDS = {
    "llama": [],
    "opt": [],
    "gpt_neox": [],
    "gpt2": [],
    "gemma3_text": ["sliding_window"],
    "mistral": ["sliding_window"],
    "qwen2_moe": ["sliding_window"],
    "phimoe": ["sliding_window"],
    "llama4_text": ["attention_chunk_size"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_methods_that_change_nothing_say_what_the_stock_model_says(kind: str) -> None:
    found = judge(kind)
    assert found.verdict == RIGHT, found.why
    assert found.bounds == KINDS[kind]
    for name in METHODS:
        assert found.outcomes[name].verdict == RIGHT
        assert list(found.outcomes[name].differences) == [mode.name for mode in MODES]


def test_a_method_that_changes_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "spatten", lambda model: build_method("spatten", token_sparsity=0.3))
    model = small_model("llama")
    found = outcome("spatten", model, reference(model))
    assert found.verdict == WRONG
    assert "packed off by" in found.why
    assert "cached, token by token off by" in found.why


class Broken(MHA):
    """Checks nothing, and fails once it is asked."""

    def check(self, model: PreTrainedModel) -> None:
        pass

    def applied(self, model: PreTrainedModel) -> None:  # type: ignore[override]
        raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("kind", "made", "expected", "why"),
    [
        ("llama", lambda model: Broken(), FAILED, "alone: ZeroDivisionError: by nothing (test_models.py"),
        ("bloom", lambda model: build_method("mha"), REFUSED, "model: attention of bloom does not go through"),
    ],
)
def test_what_fails_and_what_is_refused_are_told_apart(
    kind: str, made: Callable[[PreTrainedModel], Method], expected: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "mha", made)
    model = small_model(kind)
    found = outcome("mha", model, reference(model))
    assert found.verdict == expected
    assert why in found.why


def test_a_difference_that_the_stock_model_has_too_is_its_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model: PreTrainedModel, asked: object) -> list[Tensor]:
        return [torch.full_like(each, -1.0) for each in asked.by_token]  # type: ignore[attr-defined]

    odd = verdict.Mode("odd", shifted, lambda asked: asked.by_token, verdict.difference)
    monkeypatch.setattr(verdict, "MODES", (odd,))
    model = small_model("llama")
    found = outcome("mha", model, reference(model))
    assert found.verdict == RIGHT
    assert len(found.notes) == 1
    assert found.notes[0].startswith("odd: the stock model is off by")


def test_a_type_that_cannot_be_built_says_why() -> None:
    found = judge("musicgen")
    assert found.verdict == UNBUILT
    assert "MusicgenConfig" in found.why


def stands_in(kind: str) -> Verdict:
    """Judges a type by its name."""
    if kind == "crashes":
        os._exit(3)
    while kind == "hangs":
        time.sleep(1)
    return Verdict(kind, outcomes={"mha": Outcome(RIGHT, {"alone": 0.0})})


def test_one_type_that_crashes_or_hangs_does_not_end_the_others() -> None:
    found = list(sweep(["crashes", "one", "hangs", "another"], seconds=2, judged=stands_in))
    assert [(each.kind, each.verdict) for each in found] == [
        ("crashes", FAILED),
        ("one", RIGHT),
        ("hangs", FAILED),
        ("another", RIGHT),
    ]
    assert found[0].why == "the process ended with 3"
    assert found[2].why == "no answer in 2 s"


def test_the_page_counts_what_it_lists_and_says_why() -> None:
    found = [
        Verdict(
            "a", "A", ["window"], {"mha": Outcome(RIGHT, {"alone": 1e-6}), "chai": Outcome(REFUSED, {}, "no | go")}
        ),
        Verdict("b", "B", [], {"mha": Outcome(REFUSED, {}, "model: b"), "chai": Outcome(REFUSED, {}, "model: b")}),
        Verdict("c", "C", [], {"mha": Outcome(WRONG, {"packed": 3.0}), "chai": Outcome(RIGHT, {"packed": 0.0})}),
        Verdict("d", reason="ValueError: too large", unbuilt=True),
        Verdict("e", reason="no answer in 9 s"),
    ]
    text = page(found)
    assert "Of 5 causal types of transformers: 1 WRONG, 1 FAILED, 1 right, 1 refused, 1 couldn't be built." in text
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    assert ["a", "A", "window", "1e-06", "mha alone", "no \\| go"] in rows
    assert ["b", "B", "model: b"] in rows
    assert ["c", "C", "mha: packed off by 3"] in rows
    assert rows[-1][0] == "d"


def test_an_unknown_type_is_refused_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["lama"])
    assert "type: lama given; allowed: causal types" in capsys.readouterr().err


def test_the_command_judges_the_types_it_is_given_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "sweep", lambda given, **_: map(stands_in, given))
    assert [each.kind for each in command.judged(["llama", "opt", "--out", str(tmp_path / "docs" / "page.md")])] == [
        "llama",
        "opt",
    ]
    assert capsys.readouterr().out.startswith("llama: right\nopt: right\n2 types in ")
    assert "2 right" in (tmp_path / "docs" / "page.md").read_text()
    assert {"llama", "opt", "gpt2"} <= set(kinds())
