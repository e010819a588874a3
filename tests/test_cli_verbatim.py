"""Folders, files and names reach the settings exactly as they are typed, whatever characters they have."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from chai_eval.cli import main
from chai_eval.cli.configuration import configuration
from chai_eval.cli.overrides import composed, jobs_of
from chai_eval.cli.verbatim import verbatim
from chai_eval.settings import Settings

READ: dict[str, Callable[[Settings], Any]] = {
    "results_dir": lambda settings: str(settings.results_dir),
    "data_dir": lambda settings: str(settings.task.data_dir),
    "text": lambda settings: settings.task.text,
    "model.path": lambda settings: settings.model.path,
    "tokenizer": lambda settings: settings.model.tokenizer,
    "revision": lambda settings: settings.model.revision,
}
NAMES = [
    r"back\slash",
    r"C:\runs\new",
    "ends in one\\",
    "${task}",
    r"\${task}",
    r"\\${oc.env:HOME}/x",
    "${",
    "$HOME/$x",
    "it's",
    "a \"quoted\" 'name'",
    "[1] {2} (3)=4: 5",
    "x'${task}'\\",
]
PIECES = ["\\", "'", '"', "$", "{", "}", "${", "${task}", "[", "]", "(", ")", "=", ":", " ", "a"]


def drawn(count: int) -> list[str]:
    """Names of awkward pieces, of which none begins with a quote or has blanks around it."""
    draw = random.Random(0)
    names = ("".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in itertools.count())
    return list(itertools.islice((each for each in names if each.strip() == each and each[0] not in "'\""), count))


@pytest.mark.parametrize("first", range(0, len(NAMES), 3))
def test_a_value_is_taken_as_it_is_typed(first: int) -> None:
    names = dict(zip(READ, itertools.islice(itertools.cycle(NAMES), first, None), strict=False))
    (job,) = jobs_of([f"{setting}={name}" for setting, name in names.items()], multirun=False)
    assert {setting: read(job.settings) for setting, read in READ.items()} == names


def test_names_of_any_awkward_characters_come_through_hydra_and_omegaconf_as_they_were() -> None:
    parser = OverridesParser.create()
    for name in drawn(300):
        value = parser.parse_override(f"results_dir={verbatim(name)}").value()
        config = OmegaConf.create({"task": "piqa", "results_dir": value, "sweep": "${results_dir}/.sweep"})
        assert OmegaConf.to_container(config, resolve=True) == {
            "task": "piqa",
            "results_dir": name,
            "sweep": f"{name}/.sweep",
        }


def test_each_value_of_a_sweep_is_taken_and_shown_as_it_is_typed() -> None:
    names = [name for name in NAMES if "'" not in name]
    jobs = jobs_of([f"results_dir={','.join(names)}"], multirun=True)
    assert [READ["results_dir"](job.settings) for job in jobs] == names
    assert [job.label for job in jobs] == [f"results_dir={name}" for name in names]


def test_quotes_around_a_value_are_no_part_of_it_and_keep_a_comma_in_it() -> None:
    (job,) = jobs_of(["results_dir='${task} a\\b, c'"], multirun=False)
    assert READ["results_dir"](job.settings) == "${task} a\\b, c"
    jobs = jobs_of(["results_dir='a,${task}',\"b\"", "text=null,x.txt"], multirun=True)
    assert [(str(job.settings.results_dir), job.settings.task.text) for job in jobs] == [
        ("a,${task}", None),
        ("a,${task}", "x.txt"),
        ("b", None),
        ("b", "x.txt"),
    ]


@pytest.mark.parametrize("name", NAMES[::4])
def test_what_a_launcher_composes_again_in_its_process_is_the_same(name: str) -> None:
    (job,) = jobs_of([f"results_dir={name}", f"data_dir={name}"], multirun=True)
    with configuration():
        loader = GlobalHydra.instance().config_loader()
        # As Hydra's launchers do: once for the sweep, and from that once for each job of it.
        sweep = GlobalHydra.instance().hydra.compose_config("config", list(job.overrides), run_mode=None)  # type: ignore[union-attr, arg-type]
        again = loader.load_sweep_config(sweep, list(job.overrides))
    assert (again.results_dir, again.data_dir) == (name, name)
    assert again.hydra.sweep.dir == f"{name}/.sweep"


@pytest.mark.parametrize(("config", "name"), [("analyse", NAMES[4]), *(("calibrate", name) for name in NAMES[::3])])
def test_the_other_commands_take_them_as_they_are_typed_too(config: str, name: str) -> None:
    settings = ("text", "out", "path", "tokenizer", "revision")
    values = composed(config, [f"{setting}={name}" for setting in settings])
    model = values["model"]
    assert [values["text"], values["out"], model["path"], model["tokenizer"], model["revision"]] == [name] * 5


def test_a_measurement_names_the_folder_as_it_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / r"${task}\taken"
    taken.write_text("")
    assert main(["measure", f"results_dir={taken}/results", "model=tiny_llama_random"]) == 2
    assert f"({taken} is a file)" in capsys.readouterr().err


def test_results_go_to_the_folder_as_it_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"goal": "open a jar", "sol1": "twist the lid", "sol2": "bake it", "label": 0}
    (tmp_path / r"my ${data}\dir").mkdir()
    (tmp_path / r"my ${data}\dir" / "piqa.jsonl").write_text(json.dumps(row))
    results = tmp_path / r"back\slash${task}"
    given = ["model=tiny_llama_random", "task=piqa", "method=mha", "model.config={rms_norm_eps:0.001}"]
    assert main([*given, rf"data_dir={tmp_path}/my ${{data}}\dir", f"results_dir={results}"]) == 0
    (record,) = results.glob("tiny_llama_random/piqa/mha-*/record.json")
    config = json.loads(record.read_text())["config"]
    assert config["results_dir"] == str(results)
    assert config["model"]["config"] == {"rms_norm_eps": 0.001}
    capsys.readouterr()
    assert main(["status", f"results_dir={results}"]) == 0
    assert "| finished |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed",
    [
        ["model.config={rms_norm_eps:0.001,rope_parameters:{rope_type:default,rope_theta:5e3}}"],
        ["model.config={rms_norm_eps:0.001}", "model.config.rope_parameters={rope_type:default,rope_theta:5e3}"],
        ["model.config.rms_norm_eps=0.001", "model.config={rope_parameters:{rope_type:default,rope_theta:5e3}}"],
    ],
)
def test_a_mapping_changes_a_models_config_as_single_fields_do(typed: list[str]) -> None:
    single = [
        "model.config.rms_norm_eps=0.001",
        "model.config.rope_parameters.rope_type=default",
        "model.config.rope_parameters.rope_theta=5e3",
    ]
    (expected,) = jobs_of(["model=tiny_llama_random", *single], multirun=False)
    (found,) = jobs_of(["model=tiny_llama_random", *typed], multirun=False)
    assert found.settings == expected.settings
    wanted = composed("calibrate", ["model=tiny_llama_random", *single])
    assert composed("calibrate", ["model=tiny_llama_random", *typed]) == wanted


def test_mappings_can_be_swept_over() -> None:
    jobs = jobs_of(["model=tiny_llama_random", "model.config={rms_norm_eps:0.1},{rms_norm_eps:0.2}"], multirun=True)
    assert [job.settings.model.config for job in jobs] == [{"rms_norm_eps": 0.1}, {"rms_norm_eps": 0.2}]


@pytest.mark.parametrize("typed", ["model.config=5", "model.config=[1]", "model.config=x"])
def test_what_is_no_mapping_is_refused(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    error = capsys.readouterr().err
    assert error.startswith("model.config")
    assert "; allowed: " in error
    assert error.count("\n") == 1
