"""How close a method is to plain attention, from a whole run to record and table: stored, reused, made again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from chai_eval.cli import main
from chai_eval.cli.configuration import configuration
from chai_eval.cli.overrides import settings_of
from chai_eval.errors import RunError, SettingError
from chai_eval.methods import build_method
from chai_eval.run import Report, run
from chai_eval.scoring import fidelity as scoring
from chai_eval.scoring.runner import Runner
from chai_eval.session import Session
from chai_eval.settings import MethodSettings, ModelSettings, Settings
from chai_eval.store.record import read_record
from chai_eval.store.status import list_results
from tests.kill_and_resume import write_documents

DOCUMENTS = 6


@pytest.fixture(scope="module")
def session() -> Session:
    """One for all, so that the model is loaded once."""
    return Session()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_documents(tmp_path / "documents", DOCUMENTS)
    with configuration():
        made = settings_of(["model=tiny_llama_random", "model.device=cpu", "task=piqa", "limit=null", "fidelity=4"])
    return replace(made, results_dir=tmp_path / "results", task=replace(made.task, data_dir=tmp_path / "documents"))


def test_defaults_in_python_are_those_of_the_configuration() -> None:
    with configuration():
        configured = settings_of(["limit=null"])
    bare = Settings(ModelSettings("any"), MethodSettings("any"))
    assert replace(configured, model=bare.model, method=bare.method) == bare


def ended(settings: Settings, session: Session) -> Report:
    report = run(settings, session)
    assert report.failures == ()
    return report


def folder(settings: Settings, method: str = "chai", task: str = "piqa") -> Path:
    (path,) = settings.results_dir.glob(f"tiny_llama_random/{task}/{method}-*")
    return path


def record(settings: Settings, method: str = "chai") -> dict[str, Any]:
    found = read_record(folder(settings, method))
    assert found is not None
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of documents of every comparison that was made."""
    made: list[int] = []
    compare = scoring.task_fidelity

    def noting(runner: Any, method: Any, prepared: Any, documents: int) -> Any:
        made.append(documents)
        return compare(runner, method, prepared, documents)

    monkeypatch.setattr(scoring, "task_fidelity", noting)
    return made


def test_record_and_row_have_what_the_comparison_of_the_first_documents_gives(
    settings: Settings, session: Session
) -> None:
    (row,) = ended(settings, session).rows
    loaded = session.model(settings.model)
    prepared = session.prepared("piqa", settings.task, settings.seed)
    method = build_method("chai", **settings.method.options)
    expected = scoring.task_fidelity(Runner(loaded.model, loaded.tokenizer, progress=False), method, prepared, 4)
    assert expected is not None
    found = record(settings)["fidelity"]
    for name in ("divergence", "agreement"):
        mean = getattr(expected, name)
        assert found[name] == {"value": mean.value, "low": mean.low, "high": mean.high}
    assert (found["perplexity"], found["baseline_perplexity"]) == (expected.perplexity, expected.baseline_perplexity)
    assert (found["documents"], found["tokens"]) == (4, expected.tokens)
    assert (row.divergence, row.agreement) == (expected.divergence.value, expected.agreement.value)
    samples = pd.read_parquet(folder(settings) / "fidelity.parquet")
    pd.testing.assert_frame_equal(samples, expected.samples, check_exact=True)
    assert list(samples.columns) == [
        "doc_id", "tokens", "divergence", "agreement", "log_likelihood", "baseline_log_likelihood", "infinite_tokens",
    ]  # fmt: skip


def test_what_stands_there_is_taken_for_as_many_documents_or_fewer_and_made_again_for_more(
    settings: Settings, session: Session, calls: list[int]
) -> None:
    first = ended(settings, session)
    assert ended(settings, session).rows == first.rows
    assert calls == [4]
    stored = record(settings)
    (row,) = ended(replace(settings, fidelity=2), session).rows
    assert (calls, record(settings)) == ([4], stored)
    samples = pd.read_parquet(folder(settings) / "fidelity.parquet")
    assert (row.divergence, row.agreement) == (samples["divergence"][:2].mean(), samples["agreement"][:2].mean())
    everything = ended(replace(settings, fidelity=None), session)
    assert record(settings)["fidelity"]["documents"] == DOCUMENTS
    assert ended(replace(settings, fidelity=50), session).rows == everything.rows
    assert calls == [4, DOCUMENTS]
    (row,) = ended(settings, session).rows
    assert calls == [4, DOCUMENTS]
    # The batches are others: float32.
    assert row.divergence == pytest.approx(first.rows[0].divergence, rel=1e-4)


def test_of_stored_documents_the_first_of_the_task_count_where_one_had_nothing_to_predict(
    settings: Settings, session: Session, calls: list[int]
) -> None:
    ended(settings, session)
    path = folder(settings) / "fidelity.parquet"
    samples = pd.read_parquet(path)
    samples[samples["doc_id"] != 1].to_parquet(path, index=False)
    changed = record(settings)
    changed["fidelity"]["documents"] = 3
    (folder(settings) / "record.json").write_text(json.dumps(changed))
    (row,) = ended(replace(settings, fidelity=2), session).rows
    assert (row.divergence, calls) == (samples["divergence"][0], [4])


def test_the_baseline_has_none_and_none_is_made_where_none_is_wanted(
    settings: Settings, session: Session, calls: list[int]
) -> None:
    (row,) = ended(replace(settings, fidelity=0), session).rows
    assert (row.divergence, row.agreement, calls) == (None, None, [])
    assert "fidelity" not in record(settings)
    assert not list(settings.results_dir.rglob("fidelity.parquet"))
    ended(settings, session)
    assert "fidelity" not in record(settings, "mha")
    assert [path.parent for path in settings.results_dir.rglob("fidelity.parquet")] == [folder(settings)]
    (row,) = ended(replace(settings, fidelity=0), session).rows
    assert row.divergence is None


def test_a_run_killed_between_scoring_and_comparing_goes_on_to_the_same_numbers(
    settings: Settings, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(settings, results_dir=settings.results_dir.with_name("whole"))
    ended(whole, session)

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(scoring, "task_fidelity", killed)
        with pytest.raises(KeyboardInterrupt):
            run(settings, session)
    assert {each.state for each in list_results(settings.results_dir)} == {"finished"}
    scored = record(settings)
    ended(settings, session)
    resumed = record(settings)
    assert resumed.pop("fidelity") == record(whole)["fidelity"]
    assert resumed == scored
    assert (folder(settings) / "fidelity.parquet").read_bytes() == (folder(whole) / "fidelity.parquet").read_bytes()


@pytest.mark.parametrize("left", ["no file", "half a file", "another number", "no record of it"])
def test_a_run_killed_while_it_wrote_compares_again(
    settings: Settings, session: Session, calls: list[int], left: str
) -> None:
    ended(settings, session)
    before, path = record(settings), folder(settings) / "fidelity.parquet"
    if left == "no file":
        path.unlink()
    elif left == "half a file":
        path.write_bytes(path.read_bytes()[:100])
    elif left == "another number":
        pd.read_parquet(path)[:2].to_parquet(path)
    else:
        rest = {name: value for name, value in before.items() if name != "fidelity"}
        (folder(settings) / "record.json").write_text(json.dumps(rest))
    (folder(settings) / ".fidelity.parquet.1.tmp").write_bytes(b"half")
    ended(settings, session)
    assert calls == [4, 4]
    assert record(settings) == before
    names = ["fidelity.parquet", "record.json", "samples.parquet"]
    assert sorted(each.name for each in folder(settings).iterdir()) == names
    assert len(pd.read_parquet(path)) == 4


def test_tidying_up_and_status_leave_it_alone(settings: Settings, session: Session, calls: list[int]) -> None:
    ended(settings, session)
    (folder(settings) / "journal.jsonl").write_text("")  # killed between writing the record and tidying up
    assert {each.state for each in list_results(settings.results_dir)} == {"finished"}
    ended(settings, session)
    assert calls == [4]
    assert not (folder(settings) / "journal.jsonl").exists()


@pytest.mark.parametrize("error", [RunError, SettingError])
def test_a_comparison_that_fails_leaves_the_scores_in_the_table_and_says_what_leaves_it_out(
    settings: Settings,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[Exception],
) -> None:
    compare = scoring.task_fidelity

    def fails(runner: Any, method: Any, prepared: Any, documents: int) -> Any:
        if prepared.task_name == "piqa":
            raise error("logits: not finite, first in layer 1")
        return compare(runner, method, prepared, documents)

    monkeypatch.setattr(scoring, "task_fidelity", fails)
    given = ["model=tiny_llama_random", "device=cpu", "task=[piqa,boolq]", "fidelity=4"]
    given += [f"data_dir={settings.task.data_dir}", f"results_dir={settings.results_dir}", "limit=null"]
    assert main(given, session=session) == 1
    printed = capsys.readouterr()
    assert printed.err.endswith("piqa, fidelity: logits: not finite, first in layer 1; fidelity=0 leaves it out\n")
    piqa, boolq = (line.split("|") for line in printed.out.splitlines()[-2:])
    assert [cell.strip() for cell in piqa[-3:-1]] == ["–", "–"]
    assert float(piqa[5]) == pytest.approx(100 * record(settings)["metrics"]["acc_norm"]["value"], abs=0.01)
    assert float(boolq[-3]) > 0
    assert {each.state for each in list_results(settings.results_dir)} == {"finished"}
    assert main([*given, "fidelity=0"], session=session) == 0


def test_a_single_document_has_no_interval_and_the_record_stays_plain_json(
    settings: Settings, session: Session
) -> None:
    ended(replace(settings, fidelity=1), session)
    found = record(settings)["fidelity"]
    assert found["divergence"]["value"] > 0
    assert found["divergence"]["low"] is found["divergence"]["high"] is None
    json.dumps(found, allow_nan=False)


def test_piqa_and_running_text_stand_in_one_table_with_both_columns(
    settings: Settings, session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "my text.txt"
    text.write_text("\n\n".join(f"Passage {number} of a few words." for number in range(5)))
    given = ["model=tiny_llama_random", "device=cpu", "task=[piqa,text]", f"text={text}", "limit=4", "fidelity=3"]
    given += [f"data_dir={tmp_path / 'documents'}", f"results_dir={tmp_path / 'results'}"]
    assert main(given, session=session) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert table[0][-2:] == ["KL", "same token (%)"]
    assert [row[:3] for row in table[2:]] == [["piqa", "acc_norm", "4"], ["text", "byte_perplexity", "4"]]
    for task, row in zip(("piqa", "text"), table[2:], strict=True):
        path = folder(settings, task=task)
        found = (read_record(path) or {})["fidelity"]
        assert float(row[-2]) == pytest.approx(found["divergence"]["value"], rel=6e-3)
        assert float(row[-1]) == pytest.approx(100 * found["agreement"]["value"], abs=0.06)
        assert " to " in row[6]


@pytest.mark.parametrize("place", [4, 60, -60, -5])
def test_a_damaged_comparison_is_named_and_made_anew(
    settings: Settings, session: Session, calls: list[int], warnings: Callable[[], list[str]], place: int
) -> None:
    first = ended(settings, session)
    path = folder(settings) / "fidelity.parquet"
    whole, described = path.read_bytes(), record(settings)
    changed = bytearray(whole)
    changed[place] ^= 4
    path.write_bytes(changed)
    (listed,) = [each for each in list_results(settings.results_dir) if each.method == "chai"]
    assert listed.state == "finished"
    assert "fidelity.parquet not readable (not what was written" in listed.detail
    assert ended(settings, session).rows == first.rows
    assert calls == [4, 4]
    assert (path.read_bytes(), record(settings)) == (whole, described)
    (said,) = warnings()
    assert said.startswith(f"{path}: not readable (")
    assert said.endswith("; compared anew")


def test_finished_results_are_shown_where_nothing_can_be_written_and_only_they(
    settings: Settings, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model=tiny_llama_random", "device=cpu", "limit=null", f"data_dir={settings.task.data_dir}"]
    given += [f"results_dir={settings.results_dir}", "fidelity=4"]
    assert main([*given, "task=piqa"], session=session) == 0
    table = capsys.readouterr().out

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    before = sorted(settings.results_dir.rglob("*"))
    assert main([*given, "task=piqa"], session=session) == 0
    assert capsys.readouterr().out == table
    line = f"results_dir: {str(settings.results_dir)!r} can't be written (Read-only file system); allowed: "
    assert main([*given, "task=[piqa,boolq]"], session=session) == 2
    printed = capsys.readouterr()
    assert printed.out == table
    assert printed.err.splitlines()[-1].startswith(f"boolq: {line}")
    assert main([*given, "task=piqa", "fidelity=6"], session=session) == 1
    printed = capsys.readouterr()
    assert "| piqa " in printed.out
    assert printed.err.splitlines()[-1].startswith(f"piqa, fidelity: {line}")
    assert main([*given, "task=piqa", "measure=latency"], session=session) == 2
    assert capsys.readouterr().err.startswith(line)
    assert sorted(settings.results_dir.rglob("*")) == before


def test_a_run_through_the_cache_is_another_result_with_the_same_scores_and_says_so(
    settings: Settings, session: Session
) -> None:
    packed = ended(settings, session)
    decoded = ended(replace(settings, scoring="decode"), session)
    assert ("scoring", "decode: token by token through the cache") in decoded.header.facts
    assert "scoring" not in dict(packed.header.facts)
    for method in ("mha", "chai"):
        folders = list(settings.results_dir.glob(f"tiny_llama_random/piqa/{method}-*"))
        found = {record["config"]["scoring"]: path for path in folders if (record := read_record(path)) is not None}
        assert len(folders) == 2
        first, second = (
            np.concatenate(pd.read_parquet(found[scoring] / "samples.parquet")["loglikelihoods"].tolist())
            for scoring in ("packed", "decode")
        )
        # float32; a choice of a few dozen tokens sums as many roundings of about 1e-6.
        np.testing.assert_allclose(second, first, atol=1e-4, rtol=0)
