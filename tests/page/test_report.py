"""What a report says against the same numbers by other libraries, and what it does with records it can't use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, ttest_rel
from statsmodels.stats.contingency_tables import mcnemar

from chai_eval.checksum import sha256_of, write_document
from chai_eval.cli import main
from chai_eval.report.command import report
from chai_eval.report.decision import Decision
from chai_eval.report_settings import ReportSettings
from chai_eval.store.record import LAYOUT, RECORD
from tests.page.made import HARMFUL, documents, frontier, result

COUNT = 60


def flips(lost: int, gained: int) -> tuple[list[bool], list[bool]]:
    """Forty of sixty right, and what a method makes of them."""
    before = [at < 40 for at in range(COUNT)]
    after = [at >= lost if at < 40 else at < 40 + gained for at in range(COUNT)]
    return before, after


def noisy(mean: float, seed: int) -> list[float]:
    return (mean * (1 + 0.1 * np.random.default_rng(seed).standard_normal(40))).tolist()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    rows = documents(tmp_path / "data")
    before, after = flips(9, 2)
    for task in ("piqa", "boolq"):
        own = {"rows": rows, "data_dir": tmp_path / "data"} if task == "piqa" else {}
        result(folder, "mha", before, task=task, **own)
        result(folder, "chai", after, task=task, divergence=noisy(0.3, 1), held=0.86, **own)
        result(folder, "chai_static", flips(2, 2)[1], task=task, divergence=noisy(0.2, 2), held=0.86, **own)
    return folder


def made(results: Path, *changes: str, **given: object) -> tuple[Path, list[Decision], list[str]]:
    settings = {"results_dir": (results,), "out": results.parent / "out", "figures": False, **given}
    return report(ReportSettings(**settings), "python -m chai_eval report")


def table(results: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(results.parent / "out" / "tables" / f"{name}.csv")


def test_differences_and_p_values_are_those_of_pandas_statsmodels_and_scipy(results: Path) -> None:
    made(results)
    scores = table(results, "scores").set_index(["method", "task"])
    before, after = (pd.Series(each) for each in flips(9, 2))
    found = scores.loc[("chai", "piqa")]
    assert found["difference"] == pytest.approx(100 * (after.mean() - before.mean()), abs=1e-4)
    assert found["p"] == pytest.approx(mcnemar(pd.crosstab(before, after), exact=True).pvalue, rel=1e-5)
    assert found["p"] == pytest.approx(binomtest(2, 11).pvalue, rel=1e-5)
    both = table(results, "pooled").set_index("method").loc["chai"]
    assert both["p"] == pytest.approx(binomtest(4, 22).pvalue, rel=1e-5)
    assert both["n"] == 2 * COUNT


def test_methods_are_ranked_by_a_paired_comparison(results: Path) -> None:
    _, (decision,), _ = made(results)
    assert decision.ranking is not None
    assert [each.loss.method for each in decision.ranking.places] == ["chai_static", "chai"]
    low, high = ttest_rel(noisy(0.3, 1), noisy(0.2, 2)).confidence_interval()
    # Two tasks have the same numbers, so there are twice as many.
    low, high = ttest_rel(noisy(0.3, 1) * 2, noisy(0.2, 2) * 2).confidence_interval()
    assert decision.ranking.places[1].more == pytest.approx((low, high))
    assert decision.answer == "No"
    assert (
        decision.headline
        == "At 14 % of the K,V bytes saved, chai loses 1.5 times as much as chai_static: take that instead."
    )
    assert f"the difference is {low:.3g} to {high:.3g} (95 %, paired)" in decision.sentences[0]
    assert decision.sentences[1].startswith("Least lost first: chai_static, chai. The ranking is decisive")


def test_a_frontier_decides_where_there_is_one_and_what_it_cannot_tell_is_said(results: Path) -> None:
    near = np.random.default_rng(5).standard_normal(30)
    losses = {
        "chai": (0.141, (1 + 0.1 * near).tolist()),
        "kv_rank": (0.14, (1 - 0.01 + 0.1 * near[::-1]).tolist()),
        "v_reuse": (0.2, (3 + near).tolist()),
        "key_int8": (0.05, [0.01] * 30),
    }
    frontier(results / "frontier" / "x", "tiny", losses)
    _, (decision,), _ = made(results)
    assert decision.ranking is not None
    # Eight bits save too little, and are no candidate.
    assert [each.loss.method for each in decision.ranking.places] == ["kv_rank", "chai", "v_reuse"]
    assert decision.answer == "Not decided"
    assert "can't be told from kv_rank" in decision.headline
    assert "kv_rank, chai, v_reuse. The ranking is not decisive everywhere" in decision.sentences[1]
    assert "paired 95 % intervals can't tell chai from kv_rank (" in decision.sentences[1]
    _, (less,), _ = made(results, saving=0.05)
    assert less.ranking is not None
    assert less.ranking.places[0].loss.method == "key_int8"
    assert less.answer == "No"


def test_a_damaged_record_is_named_and_left_out_and_the_rest_is_reported(results: Path) -> None:
    folder = next(results.glob("tiny/boolq/chai-*"))
    (folder / "samples.parquet").write_bytes(b"nothing")
    lonely = result(results, "v_reuse", [True] * 3, task="arc_easy")
    out, _, left_out = made(results)
    assert any(str(folder / "samples.parquet") in line for line in left_out)
    assert any(str(lonely) in line and "plain attention" in line for line in left_out)
    scores = table(results, "scores")
    assert ("chai", "boolq") not in set(zip(scores["method"], scores["task"], strict=True))
    assert ("chai", "piqa") in set(zip(scores["method"], scores["task"], strict=True))
    text = (out / "index.html").read_text()
    assert "samples.parquet" in text


def test_of_the_same_settings_the_latest_result_counts_and_settings_that_differ_tell_methods_apart(
    results: Path, tmp_path: Path
) -> None:
    rows = documents(tmp_path / "data")
    own = {"rows": rows, "data_dir": tmp_path / "data"}
    result(results, "chai", flips(0, 3)[1], held=0.86, finished="2026-02-01T00:00:00+00:00", **own)
    result(results, "chai", flips(1, 1)[1], held=0.86, settings={"probe_tokens": 3}, **own)
    result(results, "chai", flips(2, 1)[1], held=0.86, settings={"probe_tokens": 8}, **own)
    made(results)
    scores = table(results, "scores").set_index(["method", "task"])
    assert scores.loc[("chai", "piqa"), "difference"] == pytest.approx(100 * 3 / COUNT, abs=1e-4)
    assert scores.loc[("chai, probe_tokens 3", "piqa"), "difference"] == 0
    assert ("chai, probe_tokens 8", "piqa") in scores.index


@pytest.mark.parametrize(
    ("paper", "after", "says"),
    [
        (None, flips(2, 1)[1], "not comparable: the paper's figure is of llama7b"),
        ("llama7b", flips(2, 1)[1], "agrees: the paper's difference lies in our interval"),
        ("llama7b", flips(30, 0)[1], "differs by -48.00 points; the paper's lies outside our interval"),
        ("opt125m", flips(2, 1)[1], "the paper has no figure"),
    ],
)
def test_the_papers_figure_stands_beside_ours_with_a_verdict(
    paper: str | None, after: list[bool], says: str, tmp_path: Path
) -> None:
    for method, right in (("mha", flips(0, 0)[0]), ("chai", after)):
        result(tmp_path / "results", method, right, paper=paper)
    made(tmp_path / "results")
    (line,) = table(tmp_path / "results", "scores").to_dict("records")
    assert line["verdict"] == says
    if paper != "opt125m":
        assert line["paper"] == -2.0


def test_claims_of_the_paper_are_held_against_the_records(results: Path) -> None:
    made(results)
    claims = table(results, "claims").set_index("claim")
    predictions = claims.loc["CHAI loses less than CHAI-static: clusters by request beat fixed (predictions)"]
    assert predictions["verdict"] == "disagrees: it is the other way round"
    chai = table(results, "scores").query("method == 'chai'")
    assert (chai["low"] < -3.2).all()
    assert (chai["high"] > -3.2).all()
    assert claims.loc["CHAI loses at most 3.2 points on any task", "verdict"].startswith("can't be told")


def test_the_same_records_and_command_give_the_same_files(results: Path) -> None:
    frontier(results / "frontier" / "x", "tiny", {"chai": (0.14, noisy(0.3, 1)), "kv_rank": (0.14, noisy(0.1, 2))})
    figures = {"figures": True} if _matplotlib() else {}
    out, *_ = made(results, **figures)
    first = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again, *_ = made(results, **figures, out=results.parent / "again")
    second = {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert first == second
    assert len(first) > 10


def _matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def test_tables_are_the_same_in_every_form(results: Path) -> None:
    out, *_ = made(results)
    for name in ("scores", "pooled", "claims", "records"):
        texts = [(out / "tables" / f"{name}.{end}").read_text() for end in ("md", "tex")]
        lines = len(pd.read_csv(out / "tables" / f"{name}.csv"))
        assert texts[0].strip().count("\n") == lines + 3
        assert all(each in texts[1] for each in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{", f"tab:{name}"))
        assert texts[1].partition(r"\midrule")[2].count(r"\\") == lines


def test_it_is_a_command_that_loads_no_torch(results: Path) -> None:
    code = (
        "import sys; from chai_eval.cli import main; "
        f"status = main(['report', 'results_dir={results}', 'out={results.parent / 'cli'}', 'figures=false']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny: use chai? No. At 14 % of the K,V bytes saved, chai loses 1.5 times as much")
    assert done.stdout.endswith(f"{results.parent / 'cli' / 'index.html'}\n")


def test_probe_lengths_are_compared_pair_by_pair_and_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    before, after = flips(4, 2)
    result(folder, "mha", before)
    losses = {1: noisy(0.5, 3), 5: noisy(0.3, 1), 16: (np.array(noisy(0.3, 1)) + noisy(0.001, 4)).tolist()}
    for length, divergence in losses.items():
        result(folder, "chai", after, settings={"probe_tokens": length}, divergence=divergence, held=0.86)
    out, *_ = made(folder, **({"figures": True} if _matplotlib() else {}))
    claims = table(folder, "claims").set_index("claim")
    assert claims.loc["Five probe tokens beat 1", "verdict"] == "agrees"
    low, high = ttest_rel(losses[1], losses[5]).confidence_interval()
    assert f"{low:+.3g} to {high:+.3g} more" in claims.loc["Five probe tokens beat 1", "ours"]
    assert claims.loc["Five probe tokens are enough: 16 do not help", "verdict"] == "agrees: more do not help"
    assert (out / "figures" / "sweep-tiny-chai-probe_tokens.svg").exists() == _matplotlib()


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("saving=1.5", "saving: 1.5 given; allowed: a number from 0 to below 1"),
        ("results_dir=nowhere", "results_dir: 'nowhere' given; allowed: a folder with records, or several as [a,b]"),
        ("results_dir=[]", "results_dir: "),
        ("documents=-1", "documents: -1 given; allowed: a whole number from 0 up"),
        ("savin=0.1", "savin: 'savin' is unknown (did you mean saving?)"),
        ("model=smollm2", "model: "),
    ],
)
def test_bad_input_is_one_line(
    typed: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    assert main(["report", typed]) == 2
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


def test_folders_without_records_are_refused_and_several_are_read(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["report", "results_dir=empty"]) == 2
    assert "has no record of a run" in capsys.readouterr().err
    assert main(["report", "results_dir=[empty,results]", "out=here", "figures=false"]) == 0
    assert json.loads(json.dumps(capsys.readouterr().out)).endswith("here/index.html\n")


def test_what_experiments_found_stands_on_the_page_where_it_is_short_enough_to_read(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    result(folder, "mha", flips(4, 2)[0])
    for name, lines, quick in (("head_correlation", 3, True), ("latency", 201, False)):
        place = folder / "experiments" / name / "tiny"
        place.mkdir(parents=True)
        frame = pd.DataFrame({"layer": range(lines), "mean": [0.25, None, *[0.5] * (lines - 2)], "quick": quick})
        frame.to_csv(place / "data.csv", index=False)
        content = {
            "kind": "experiment", "experiment": name, "title": f"{HARMFUL} {name}", "quick": quick,
            "model": {"name": "tiny"}, "command": "python -m chai_eval", "layout": LAYOUT,
        }  # fmt: skip
        write_document(place / RECORD, content, {"data.csv": sha256_of(place / "data.csv")})
    out, *_ = made(folder)
    shown = table(folder, "experiment-head-correlation-tiny-quick")
    assert shown["layer"].tolist() == [0, 1, 2]
    assert shown["mean"].tolist()[::2] == [0.25, 0.5]
    assert "quick" not in shown
    page = (out / "index.html").read_text()
    assert "A quick look" in page
    assert HARMFUL not in page
    assert not (out / "tables" / "experiment-latency-tiny.csv").exists()
