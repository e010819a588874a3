from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chai_eval.cli import main
from chai_eval.cli.overrides import jobs_of

ROOT = Path(__file__).parents[1]

# What is typed, how the line begins, and a word of what it says is allowed.
MISTAKES = [
    ("model=llama8b", "model: 'llama8b' is unknown (did you mean llama7b?)", "smollm2_mha"),
    ("method=chia", "method: 'chia' is unknown (did you mean chai?)", "mha"),
    ("limit=-1", "limit: -1 given", "from 1 up"),
    ("limit=0", "limit: 0 given", "from 1 up"),
    ("limit=ten", "limit: 'ten' given", "null"),
    ("limit=1.5", "limit: 1.5 given", "null"),
    ("limit=true", "limit: True given", "null"),
    ("limt=5", "limt: 'limt' is unknown (did you mean limit?)", "batch_tokens"),
    ("seed=-1", "seed: -1 given", "from 0 to 4294967295"),
    ("seed=4294967296", "seed: 4294967296 given", "from 0 to 4294967295"),
    ("scoring=fast", "scoring: 'fast' given", "packed, decode"),
    ("batch_tokens=0", "batch_tokens: 0 given", "from 1 up"),
    ("fidelity=-1", "fidelity: -1 given", "from 0 up, or null"),
    ("fidelity=half", "fidelity: 'half' given", "null"),
    ("fidelity=true", "fidelity: True given", "null"),
    ("source=web", "source: 'web' given", "local"),
    ("task=", "task: '' given", "paper"),
    ("task=[]", "task: [] given", "paper"),
    ("task=[piqa,3]", "task: ['piqa', 3] given", "paper"),
    ("dtype=float64", "model.dtype: 'float64' given", "bfloat16"),
    ("device=gpu", "model.device: 'gpu' given", "cuda:N"),
    ("weights=zero", "model.weights: 'zero' given", "random"),
    ("layers=0", "model.layers: 0 given", "from 1 up"),
    ("model.name=../x", "model.name: '../x' given", "letters"),
    ("model.nmae=x", "model.nmae: 'nmae' is unknown", "weights"),
    ("probe_tokens=3", "probe_tokens: unknown (did you mean method.probe_tokens?)", "method.probe_tokens"),
    ("method.probe_tokns=3", "method.probe_tokns: 'probe_tokns' is unknown (did you mean probe_tokens?)", "clusters"),
    ("method.probe_tokens=0", "method.probe_tokens: 0", "1"),
    ("method.with=[dejavoo]", "method: 'dejavoo' given", "dejavu"),
    ("method.with=7", "method.with: 7 given", "[dejavu]"),
    ("method.probe_tokens=1,3", "method.probe_tokens: '1,3' given, several values", "-m"),
    ("method.features=half", "method.features: 'half'", "triangle"),
    ("method.clusters=[[9,17]", "method.clusters: '[[9,17]' given, which can't be read", "quoted"),
    ("method.clusters=[[9,17],3.5]", "method.clusters:", "run-length"),
    ("method.clusters=[[8,100000000]]", "method.clusters: [8, 100000000] given", "10000"),
    ("method.clusters=${model.cluster}", "method.clusters: Interpolation key", "value"),
    ("measure.lengths=[5]", "measure.lengths: given with measure=off", "measure=latency"),
    ("launcher=slurm", "launcher: 'slurm' is unknown", "submitit_slurm"),
    ("hydra.launcher.n_jobs=3", "hydra.launcher.n_jobs: given without a launcher", "launcher=joblib"),
    ("hydra.run.dir=x", "hydra.run.dir: 'hydra' is unknown", "results_dir"),
    ("debug=maybe", "debug: 'maybe' given", "false"),
    ("~limit", "~limit: not understood", "setting=value"),
    ("limit", "limit: not understood", "setting=value"),
    ("--limit=5", "--limit=5: unknown option", "--help"),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.endswith("\n")
    return error


@pytest.mark.parametrize(("typed", "said", "allowed"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_setting_and_what_is_allowed(
    typed: str, said: str, allowed: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    line = refused(capsys, typed)
    assert line.startswith(said)
    assert allowed in line.partition("; allowed: ")[2]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "said"),
    [("task=piqq", "task: 'piqq'"), ("task=txet", "task: 'txet'"), ("source=local task=wsc", "source: local")],
)
def test_a_task_that_is_not_there_is_named(
    typed: str, said: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    line = refused(capsys, *typed.split())
    assert line.startswith(said)
    assert "; allowed: " in line
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("typed", ["path=/no/such/model task=winogrande", "path=asset:gpt9 task=winogrande"])
def test_a_model_that_is_not_there_is_named_before_the_hub_is_asked_for_a_task(
    typed: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    line = refused(capsys, *typed.split())
    assert line.startswith(f"model.path: {typed.split()[0].removeprefix('path=')} is ")
    assert "a local directory, a name on the hub" in line.partition("; allowed: ")[2]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "said", "allowed"),
    [
        (["task=text"], "text: None given with task=text", "c4, passages, auto, or a UTF-8 file"),
        (["text=a.txt"], "text: 'a.txt' given without task=text", "null, or task=text"),
        (["task=[piqa,boolq]", "text=passages"], "text: 'passages' given without task=text", "null, or task=text"),
        (["task=text", "text=no such.txt"], "text: no such.txt is no file", "a UTF-8 file"),
        (["task=text", "text="], "text: '' given", "a text or null"),
        (["task=text", "text=chat"], "text: chat given with task=text", "stdlib, kmmlu, c4, passages, auto"),
        (["task=text", "text=c4", "limit=null"], "limit: None given with text=c4", "from 1 up"),
    ],
    ids=str,
)
def test_running_text_that_cannot_be_scored_is_one_line(
    typed: list[str], said: str, allowed: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    line = refused(capsys, *typed)
    assert line.startswith(said)
    assert allowed in line.partition("; allowed: ")[2]
    assert list(elsewhere.iterdir()) == []


def test_a_results_folder_that_cannot_be_written_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    (elsewhere / "taken").write_text("")
    assert refused(capsys, "results_dir=taken/results").startswith("results_dir: 'taken/results' can't be written")


@pytest.mark.parametrize(
    "sweep", ["method.probe_tokens=1,3 limit=5,0", "model=smollm2,nonsense", "limit=interval(1,5)"]
)
def test_a_mistake_in_one_job_of_a_sweep_stops_it_before_the_first(
    sweep: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    refused(capsys, "-m", *sweep.split())
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("method.probe_tokens=glob(*)", "allowed: a list of values, range(…), choice(…)\n"),
        ("limit=interval(1,5)", "allowed: a list of values, range(…), choice(…)\n"),
        ("model=interval(1,5)", "allowed: a list of values, range(…), choice(…), glob(…)\n"),
        ("model=glob(huge*)", "which matches nothing; allowed: llama33b, llama7b, "),
    ],
)
def test_a_sweep_is_refused_with_what_works_for_its_setting(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "-m", typed)
    key, _, value = typed.partition("=")
    assert line.startswith(f"{key}: '{value}' given")
    assert said in line


@pytest.mark.parametrize("typed", ["model=glob(tiny*)", "model=glob([tiny*,llama*],exclude=llama*)"])
def test_a_glob_over_a_group_is_a_job_for_each_match(typed: str) -> None:
    jobs = jobs_of([typed, "limit=2"], multirun=True)
    assert [job.settings.model.name for job in jobs] == ["tiny_llama_random", "tiny_opt_random"]


def test_a_mistake_on_the_real_command_line_prints_nothing_but_its_line(elsewhere: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chai_eval", "limit=-1"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "limit: -1 given; allowed: a whole number from 1 up, or null\n"
    assert not (ROOT / "outputs").exists()


def test_help_lists_every_choice_and_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group in ("model", "method"):
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            assert f"\n  {path.stem} " in text
    for path in (ROOT / "tasks").glob("[!_]*.yaml"):
        assert path.stem in text
    for setting in (
        "task",
        "source",
        "data_dir",
        "limit",
        "seed",
        "scoring",
        "batch_tokens",
        "results_dir",
        "debug",
        "fidelity",
        "text",
    ):
        assert f"\n  {setting}" in text
    assert "method.probe_tokens=5" in text
    assert max(len(line) for line in text.splitlines()) <= 110
