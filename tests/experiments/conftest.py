"""A tiny random model with a calibration, documents of three tasks, a text: what experiments need, in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chai_eval.calibrate import calibrate
from chai_eval.cli import main
from chai_eval.measure.ceiling import Ceiling
from chai_eval.session import Session
from tests.calibration.test_calibrate import WORDS
from tests.calibration.test_calibrate import settings as calibrating
from tests.kill_and_resume import write_documents

Do = Callable[..., Path]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, documents and the calibration of `tiny_llama_random`."""
    folder = tmp_path_factory.mktemp("prepared")
    drawn = torch.Generator().manual_seed(0)
    words = WORDS.split()
    lines = [" ".join(words[at] for at in torch.randint(len(words), (30,), generator=drawn)) for _ in range(30)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    write_documents(folder / "documents", 6)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CHAI_EVAL_CACHE", str(folder))
        calibrate(replace(calibrating(str(folder / "text.txt"), folder), out=None), "command")
    return folder


@pytest.fixture(scope="session")
def session() -> Session:
    """One for all, so that the model is loaded once."""
    return Session()


@pytest.fixture
def do(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Session) -> Do:
    """Do an experiment on the tiny model in an empty folder, and return the folder that it wrote.

    The machine's ceiling is known without minutes of copying, and lm-eval asks nothing of the machine, which takes a
    dozen processes for every task.
    """
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    monkeypatch.setattr("chai_eval.measure.grid.measure_ceiling", lambda *_, **__: Ceiling(1e10, 1e10, 1e11))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(prepared))

    def done(name: str, *typed: str, quick: bool = True) -> Path:
        flag = ["quick=true"] if quick else []
        given = [f"+experiment={name}", "model=tiny_llama_random", "device=cpu", *flag, *typed]
        assert main(given, session) == 0
        return Path("results/experiments") / name / f"tiny_llama_random{'-quick' if quick else ''}"

    return done
