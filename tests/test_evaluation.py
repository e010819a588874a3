"""The key of a result against every setting, and the path from scoring to record, with stand-ins for the model."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig

from chai_eval import evaluation
from chai_eval.checksum import say_unchecked
from chai_eval.errors import RunError, SettingError
from chai_eval.evaluation import Evaluation, Result
from chai_eval.methods import build_method
from chai_eval.session import LoadedModel
from chai_eval.settings import MethodSettings, ModelSettings, Settings, TaskSettings
from chai_eval.store.code import NumericCode
from chai_eval.store.key import result_key
from chai_eval.store.status import list_results

CLUSTERS = [[9, 17], [3, 13]]


@dataclass(frozen=True)
class Prepared:
    task_name: str = "piqa"
    n_documents: int = 2
    n_requests: int = 4
    prompts_hash: str = "prompts"
    config_hash: str = "config"


def code(number: str) -> NumericCode:
    """Code that any module may import, so that its version is that of all."""
    return NumericCode({"chai_eval.attention": number}, {}, {})


def loaded(**changed: Any) -> LoadedModel:
    hashes = {"fingerprint": "weights", "architecture": "architecture", "vocabulary": "vocabulary", "code": code("1")}
    config = LlamaConfig(num_hidden_layers=30, num_attention_heads=9, hidden_size=576)
    model = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"), config=config)
    return LoadedModel(model, None, **{**hashes, **changed})


def settings(results_dir: Path = Path("results")) -> Settings:
    model = ModelSettings("tiny", path="hub/tiny", clusters=CLUSTERS)
    return Settings(
        model, MethodSettings("chai", {"clusters": CLUSTERS}), TaskSettings(limit=2), results_dir=results_dir
    )


def key(given: Settings | None = None, model: LoadedModel | None = None, prepared: Prepared | None = None) -> str:
    given = given or settings()
    method = build_method(given.method.name, **given.method.options)
    return result_key(Evaluation(given, model or loaded(), method, prepared or Prepared()).key_parts)  # type: ignore[arg-type]


def with_model(**changed: Any) -> Settings:
    return replace(settings(), model=replace(settings().model, **changed))


def with_method(name: str = "chai", **options: Any) -> Settings:
    return replace(settings(), method=MethodSettings(name, {"clusters": CLUSTERS, **options} if name == "chai" else {}))


CHANGES = {
    "model source": lambda: key(with_model(path="hub/other")),
    "revision": lambda: key(with_model(revision="main~1")),
    "random weights": lambda: key(with_model(weights="random")),
    "fingerprint of the weights": lambda: key(model=loaded(fingerprint="others")),
    "architecture": lambda: key(model=loaded(architecture="other")),
    "tokenizer": lambda: key(model=loaded(vocabulary="other")),
    "our numeric code": lambda: key(model=loaded(code=code("2"))),
    "method": lambda: key(with_method("mha")),
    "probe tokens": lambda: key(with_method(probe_tokens=3)),
    "features": lambda: key(with_method(features="full")),
    "representative": lambda: key(with_method(representative="medoid")),
    "clusters": lambda: key(with_method(clusters=[[9, 16], [3, 14]])),
    "task": lambda: key(prepared=Prepared(task_name="boolq")),
    "task file": lambda: key(prepared=Prepared(config_hash="other")),
    "prompts": lambda: key(prepared=Prepared(prompts_hash="other")),
    "limit": lambda: key(replace(settings(), task=TaskSettings(limit=3))),
    "no limit": lambda: key(replace(settings(), task=TaskSettings(limit=None))),
    "seed": lambda: key(replace(settings(), seed=1)),
    "scoring through the cache": lambda: key(replace(settings(), scoring="decode")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_that_can_change_a_number_changes_the_key(change: str) -> None:
    assert CHANGES[change]() != key()


def test_precision_changes_the_key() -> None:
    half = loaded()
    half.model.dtype = torch.bfloat16
    assert key(model=half) != key()


@pytest.mark.parametrize("package", ["torch", "transformers", "lm-eval"])
def test_a_version_of_what_computes_numbers_changes_the_key(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    versions = evaluation.versions()
    monkeypatch.setattr(evaluation, "versions", lambda: {**versions, package: "0.0"})
    assert key() != before


def test_a_calibration_made_anew_with_other_counts_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chai_eval import calibration_file

    file = tmp_path / "calibration" / "mine" / "calibration.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(calibration_file, "cache_dir", lambda: tmp_path)
    file.write_text(json.dumps({"presets": {"balanced": {"clusters": [[9, 17], [3, 13]]}}}))
    before = key(with_method(clusters="mine-balanced"))
    file.write_text(json.dumps({"presets": {"balanced": {"clusters": [[9, 16], [3, 14]]}}}))
    assert key(with_method(clusters="mine-balanced")) != before


SAME = {
    "batch size": lambda: key(replace(settings(), batch_tokens=64)),
    "results folder": lambda: key(settings(Path("elsewhere"))),
    "source of the same prompts": lambda: key(replace(settings(), task=TaskSettings(source="local", limit=2))),
    "a default that does not apply": lambda: key(with_model(default_limit=7, clusters=None, paper="llama7b")),
    "dtype auto that comes to the same": lambda: key(with_model(dtype="float32")),
    "device": lambda: key(with_model(device="cpu")),
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_number_keeps_the_key(change: str) -> None:
    assert SAME[change]() == key()


def test_scoring_in_packed_rows_has_no_say_in_the_key() -> None:
    given = settings()
    method = build_method("chai", **given.method.options)
    parts = Evaluation(given, loaded(), method, Prepared()).key_parts  # type: ignore[arg-type]
    assert set(parts) == {"model", "method", "task", "limit", "seed", "versions", "code"}


class Scorer:
    """Stands in for `scoring.evaluate.score`: four requests in two batches, killed or failing where told."""

    def __init__(self) -> None:
        self.batches = 0
        self.stop: BaseException | None = None

    def __call__(self, runner: Any, method: Any, prepared: Any, *, journal: Any, **_: Any) -> Any:
        for first in (0, 2):
            if all(journal.get(str(index)) is not None for index in (first, first + 1)):
                continue
            if self.stop is not None and self.batches == 1:
                raise self.stop
            self.batches += 1
            journal.append_many([(str(index), [-1 / (3 + index), True]) for index in (first, first + 1)])
        values = [journal.get(str(index))[0] for index in range(4)]
        samples = pd.DataFrame({"doc_id": [0, 1], "loglikelihoods": [values[:2], values[2:]], "acc": [1.0, 0.0]})
        return SimpleNamespace(
            samples=samples, metrics={"acc": {"value": 0.5, "stderr": 0.5}}, batch={"batch_tokens": runner.batch_tokens}
        )


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scorer]:
    one = Scorer()
    monkeypatch.setattr("chai_eval.scoring.evaluate.score", one)
    return one


def score(results_dir: Path, **changed: Any) -> Result:
    given = replace(settings(results_dir), **changed)
    return Evaluation(given, loaded(), build_method("chai", clusters=CLUSTERS), Prepared()).result()  # type: ignore[arg-type]


def test_a_finished_result_is_taken_from_the_disk_also_under_another_batch_size(tmp_path: Path, scorer: Scorer) -> None:
    first = score(tmp_path, batch_tokens=64)
    second = score(tmp_path, batch_tokens=128)
    assert scorer.batches == 2
    assert second.record == first.record
    pd.testing.assert_frame_equal(first.samples, second.samples)


def test_a_record_says_where_its_numbers_come_from(tmp_path: Path, scorer: Scorer) -> None:
    record = score(tmp_path).record
    assert record["metrics"] == {"acc": {"value": 0.5, "stderr": 0.5}}
    assert record["n_documents"] == 2
    assert record["key"] == result_key(record["key_parts"])
    assert record["config"]["method"] == {"name": "chai", "clusters": CLUSTERS}
    assert record["config"]["model"]["path"] == "hub/tiny"
    assert set(record["versions"]) >= {"python", "torch", "transformers", "lm-eval", "pandas", "chai-eval"}
    assert record["machine"]["cores"] >= 1
    assert record["wall_seconds"] >= 0
    assert record["device"] == "cpu"
    assert record["batch"] == {"batch_tokens": None}
    assert "git" in record


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RunError("logits: not finite in layer 3")], ids=repr)
def test_an_interrupted_result_goes_on_and_ends_equal_to_an_uninterrupted_one(
    tmp_path: Path, scorer: Scorer, stop: BaseException
) -> None:
    whole = score(tmp_path / "whole")
    scorer.batches, scorer.stop = 0, stop
    with pytest.raises(type(stop)):
        score(tmp_path / "broken")
    scorer.stop = None
    resumed = score(tmp_path / "broken")
    assert scorer.batches == 2
    apart = ("wall_seconds", "finished")
    same = [{name: value for name, value in each.record.items() if name not in apart} for each in (whole, resumed)]
    same[0]["config"]["results_dir"] = same[1]["config"]["results_dir"]
    assert same[0] == same[1]
    pd.testing.assert_frame_equal(whole.samples, resumed.samples)
    assert sorted(path.name for path in resumed.folder.path.iterdir()) == ["record.json", "samples.parquet"]


def test_status_says_why_a_result_failed_and_how_far_it_came(tmp_path: Path, scorer: Scorer) -> None:
    scorer.stop = RunError("logits: not finite in layer 3")
    with pytest.raises(RunError):
        score(tmp_path)
    (listed,) = list_results(tmp_path)
    assert listed.state == "failed"
    assert listed.detail == "logits: not finite in layer 3 (2 of 4 requests)"


@pytest.mark.parametrize("name", ["record.json", "samples.parquet"])
@pytest.mark.parametrize("damage", ["a changed byte", "half of it", "no JSON and no Parquet"])
def test_a_damaged_result_is_named_set_aside_and_scored_anew(
    tmp_path: Path, scorer: Scorer, warnings: Callable[[], list[str]], name: str, damage: str
) -> None:
    first = score(tmp_path)
    path = first.folder.path / name
    content = path.read_bytes()
    at = content.index(b"0.5") if name == "record.json" else content.index(b"PAR1") + 40
    damaged = {
        "a changed byte": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        "half of it": content[: len(content) // 2],
        "no JSON and no Parquet": b"\xff" * 300,
    }
    for number in (1, 2):
        path.write_bytes(damaged[damage])
        again = score(tmp_path)
        assert scorer.batches == 2 * (number + 1)
        assert again.record["metrics"] == first.record["metrics"]
        pd.testing.assert_frame_equal(again.samples, first.samples)
        aside = path.parent.with_name(f"{path.parent.name}.damaged-{number}")
        assert (aside / name).read_bytes() == damaged[damage]
        line = warnings()[-1]
        assert line.startswith(f"{path}: not ")
        assert line.endswith(f"; set aside as {aside}, scored anew")
        assert "\n" not in line
    assert [each.state for each in list_results(tmp_path)] == ["finished"]


def test_missing_samples_are_scored_anew(tmp_path: Path, scorer: Scorer, warnings: Callable[[], list[str]]) -> None:
    first = score(tmp_path)
    (first.folder.path / "samples.parquet").unlink()
    pd.testing.assert_frame_equal(score(tmp_path).samples, first.samples)
    assert "samples.parquet: not readable (it is missing); set aside as " in warnings()[-1]


def test_a_result_without_checksums_is_read_and_said_once_that_it_cannot_be_checked(
    tmp_path: Path, scorer: Scorer, warnings: Callable[[], list[str]]
) -> None:
    first = score(tmp_path)
    record = first.folder.path / "record.json"
    record.write_text(json.dumps(first.record))
    say_unchecked.cache_clear()
    for _ in range(2):
        assert score(tmp_path).record == first.record
    assert scorer.batches == 2
    assert warnings() == [
        "results written without checksums, by an earlier version: whether they are damaged can't be told"
    ]
    (listed,) = list_results(tmp_path)
    assert (listed.state, listed.detail) == ("finished", "2 documents, without checksums")


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the file system refuse what a run would write, also for root."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def begin() -> None:
        monkeypatch.setattr("tempfile.TemporaryFile", refused)
        monkeypatch.setattr(Path, "mkdir", refused)
        monkeypatch.setattr(Path, "unlink", refused)
        monkeypatch.setattr("filelock.FileLock.acquire", refused)

    return begin


@pytest.mark.parametrize("left", [None, "journal.jsonl"])
def test_a_finished_result_is_read_where_nothing_can_be_written(
    tmp_path: Path, scorer: Scorer, read_only: Callable[[], None], left: str | None
) -> None:
    first = score(tmp_path)
    if left is not None:  # killed between writing the record and tidying up
        (first.folder.path / left).write_text("")
    before = sorted(tmp_path.rglob("*"))
    read_only()
    assert score(tmp_path).record == first.record
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damaged", [False, True])
def test_what_has_to_be_scored_where_nothing_can_be_written_is_one_line_and_changes_nothing(
    tmp_path: Path, scorer: Scorer, read_only: Callable[[], None], damaged: bool
) -> None:
    if damaged:
        (score(tmp_path).folder.path / "record.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    read_only()
    with pytest.raises(SettingError, match=r"^results_dir: '.*' can't be written \(Read-only file system\); allowed: "):
        score(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
