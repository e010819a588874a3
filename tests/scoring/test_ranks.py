"""Scores of several processes against those of one: threads in place of processes, then two real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.ranks import OtherRankError, Ranks, ranks_of
from chai_eval.scoring.runner import Runner
from chai_eval.store.journal import Journal
from tests.attention.tiny import MODELS
from tests.kill_and_resume import arguments, results, write_documents
from tests.scoring.test_lm import packed, questions
from tests.scoring.tiny_text import tokenizer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Threads(Ranks):
    """Ranks that are threads of this process; what they exchange goes through a list."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list[Any]) -> None:
        super().__init__(rank, size)
        self.barrier, self.given = barrier, given

    def _all(self, kind: str, value: Any) -> list[tuple[str, Any]]:
        self.given[self.rank] = (kind, value)
        self.barrier.wait(60)
        met = list(self.given)
        self.barrier.wait(60)
        return met


def together(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns, or raises, in each of so many ranks."""
    barrier, given, found = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank, size, barrier, given))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_each_scores_its_share_and_all_know_the_scores_of_one_process(size: int) -> None:
    asked, method = questions(), build_method("chai", clusters=[8, 3, 1])
    models = [MODELS["llama"]() for _ in range(size)]
    journals = [Journal() for _ in range(size)]
    scored = [0] * size

    class Counting(PackedLM):
        def _score(self, batch: Any, asked: Any) -> Any:
            scored[self.runner.ranks.rank] += 1
            return super()._score(batch, asked)

    def score(ranks: Ranks) -> Any:
        model = models[ranks.rank]
        journal = journals[ranks.rank]
        with method.applied(model):
            runner = Runner(model, tokenizer(), batch_tokens=64, ranks=ranks, progress=False)
            return Counting(runner, method, journal=journal).loglikelihood(asked)

    (alone,) = together(1, score)
    journals[0], scored[0] = Journal(), 0
    assert together(size, score) == [alone] * size
    assert max(scored) - min(scored) <= 1
    assert sum(scored) > size
    assert all(journal == journals[0] for journal in journals)


def test_generated_texts_are_those_of_one_process() -> None:
    models, method = [MODELS["llama"]() for _ in range(2)], build_method("mha")
    asked = [
        Instance("generate_until", {}, ("a" * (1 + number % 5) + f" {number}", {"until": ["\n"], "max_gen_toks": 3}), 0)
        for number in range(20)
    ]

    def write(ranks: Ranks) -> list[str]:
        model = models[ranks.rank]
        with method.applied(model):
            return packed(model, method, ranks=ranks).generate_until(asked)

    (alone,) = together(1, write)
    assert len(set(alone)) > 5
    assert together(2, write) == [alone] * 2


def test_what_fails_in_one_fails_in_all_and_they_go_on_in_step() -> None:
    def work(ranks: Ranks) -> list[str]:
        said = []
        for failing in (1, None, 0):
            try:
                with ranks.together():
                    ranks.gather("before")
                    if ranks.rank == failing:
                        raise SettingError("limit: bad")
                    ranks.broadcast("after")
            except (SettingError, OtherRankError) as error:
                said.append(str(error))
        return said

    assert together(2, work) == [
        ["process 1 of 2: limit: bad", "limit: bad"],
        ["limit: bad", "process 0 of 2: limit: bad"],
    ]


def test_one_that_leaves_before_its_time_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)

    def work(ranks: Ranks) -> list[str]:
        said = []
        for _ in range(2) if ranks.rank != 1 else ():
            with pytest.raises(OtherRankError) as caught:
                ranks.gather("never met")
            said.append(str(caught.value))
        ranks.leave()
        return said

    first, second, third = together(3, work)
    assert first == third
    assert first[0].startswith("process 1 of 3: ended before its time")
    assert second == []


def test_a_process_that_waits_for_a_lock_lets_the_others_know_that_it_lives() -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.first:
            ranks.pulse()
            ranks.pulse()
        return ranks.broadcast("mine" if ranks.first else "not looked at")

    assert together(2, work) == ["mine", "mine"]


def test_a_process_started_alone_joins_nobody() -> None:
    assert ranks_of({"WORLD_SIZE": "4"}) == Ranks()
    assert Ranks().gather(3) == [3]


def test_requests_longer_than_the_models_positions_are_counted_in_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, method = MODELS["opt"](), build_method("mha")
    positions = model.config.max_position_embeddings
    asked = [Instance("loglikelihood", {}, ("x" * (positions + over), "a"), 0) for over in (-1, 0, 1, 7)]
    to_write = [
        Instance("generate_until", {}, ("x" * (positions - 8 + over), {"until": ["\n"], "max_gen_toks": 8}), 0)
        for over in (-1, 0, 1)
    ]
    with method.applied(model), caplog.at_level("WARNING", "chai_eval"):
        packed(model, method, description="piqa").loglikelihood(asked)
        packed(model, method, description="gsm8k").generate_until(to_write)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("chai_eval")]
    assert [line.partition(" are longer than ")[0] for line in said] == ["piqa: 2 requests", "gsm8k: 1 requests"]
    assert all(f"the {positions} positions of the model" in line for line in said)


# Two processes, of which the second fails where CHAI scores its second batch.
BROKEN = """
import os, sys
from chai_eval.cli import main
from chai_eval.scoring.lm import PackedLM

score, calls = PackedLM._score, []

def fails(self, batch, asked):
    if self.method.name == "chai" and os.environ["RANK"] == "1":
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("made to fail")
    return score(self, batch, asked)

PackedLM._score = fails
sys.exit(main())
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(command: list[str], folder: Path, name: str, tasks: str = "[piqa,boolq]") -> subprocess.CompletedProcess[str]:
    given = [*arguments(folder / "documents", folder / name), f"task={tasks}"]
    given = [each for each in given if not each.startswith("task=[piqa,boolq,arc")]
    return subprocess.run([*command, *given], capture_output=True, text=True, env=ENVIRONMENT, cwd=folder, check=False)


def comparable(folder: Path) -> dict[str, Any]:
    """Records and samples but for the number of processes, and the checkout, which others may be editing."""
    found = results(folder)
    return {name: ({**record, "processes": None, "git": None}, samples) for name, (record, samples) in found.items()}


def test_two_processes_record_what_one_does_to_the_bit(tmp_path: Path) -> None:
    write_documents(tmp_path / "documents", 12)
    one = run([sys.executable, "-m", "chai_eval"], tmp_path, "one")
    two = run([*TORCHRUN, "-m", "chai_eval"], tmp_path, "two")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert two.stdout == one.stdout.replace("one/", "two/")
    assert two.stderr.count(": scoring 24 requests") == 4
    assert len(comparable(tmp_path / "one")) == 4
    assert comparable(tmp_path / "two") == comparable(tmp_path / "one")
    for path in (tmp_path / "two").glob("*/*/*/record.json"):
        assert json.loads(path.read_text())["processes"] == 2

    # Broken in the second process, where the rest was finished before; then gone on with by one alone.
    for path in (tmp_path / "two").glob("*/boolq/chai-*/*"):
        path.unlink()
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    began = time.monotonic()
    broken = run([*TORCHRUN, str(script)], tmp_path, "two")
    assert time.monotonic() - began < 120
    assert broken.returncode == 1
    assert broken.stderr.count("finished before") == 3
    assert broken.stderr.count("boolq: process 1 of 2: ValueError: made to fail") == 1
    assert "| piqa " in broken.stdout
    assert "| boolq " not in broken.stdout
    (journal,) = (tmp_path / "two").glob("*/boolq/chai-*/journal.jsonl")
    assert 0 < len(journal.read_text().splitlines()) < 24
    resumed = run([sys.executable, "-m", "chai_eval"], tmp_path, "two")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after" in resumed.stderr
    assert comparable(tmp_path / "two") == comparable(tmp_path / "one")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("launcher=joblib", "launcher: 'joblib' given with 2 processes"),
        ("device_map=auto", "model.device_map: 'auto' given with 2 processes"),
        ("measure=latency", "measure: given with 2 processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_in_one_line(given: str, said: str) -> None:
    from chai_eval.cli.sweep import run_jobs

    with pytest.raises(SettingError, match=said):
        run_jobs(["model=tiny_llama_random", given], multirun=False, debug=False, ranks=Ranks(0, 2, 0, 2))
