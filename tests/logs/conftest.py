from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.logs.made import method, stock_log
from tests.scoring.own_folder import write_folder


@pytest.fixture(scope="package")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tasks"), scored=40)


@pytest.fixture(scope="package")
def stock(own_tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stock lm-eval's logs of one model, as it is and under a method."""
    with pytest.MonkeyPatch.context() as patch:
        # lm-eval makes a report on the machine after every task, with pip, for seconds.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        return {
            name: stock_log(tmp_path_factory.mktemp(name), own_tasks, under)
            for name, under in (("a", None), ("b", method()))
        }


@pytest.fixture
def logs(stock: dict[str, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies, to be damaged."""
    return tuple(Path(shutil.copytree(path, tmp_path / name)) for name, path in stock.items())  # type: ignore[return-value]
