"""What re-keys a result: the code it came from, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import chai_eval
from chai_eval.methods import METHODS
from chai_eval.store.code import SCORER, NumericCode


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package") / "chai_eval"
    shutil.copytree(Path(chai_eval.__file__).parent, root, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "chai_eval"))


def versions(package: Path) -> dict[str, str]:
    code = NumericCode.of(package)
    return {name: code.version(*SCORER, kind.__module__) for name, kind in METHODS.items()}


def changed(package: Path, path: str, change: Callable[[str], str]) -> set[str]:
    """Names of the methods whose results an edit re-keys."""
    before, file = versions(package), package / path
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    edited = change(text)
    assert edited != text
    file.write_text(edited, encoding="utf-8")
    return {name for name, version in versions(package).items() if version != before[name]}


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


def test_an_edit_to_one_method_re_keys_its_own_results_alone(package: Path) -> None:
    assert changed(package, "methods/spatten.py", replaced("ALWAYS = 1e30", "ALWAYS = 1e29")) == {"spatten"}


def test_an_edit_to_what_methods_share_re_keys_those_that_share_it(package: Path) -> None:
    assert changed(package, "methods/keep.py", replaced("TIE = 1e-6", "TIE = 1e-5")) == {
        "dejavu", "spatten", "head_prune", "quest", "snapkv",
    }  # fmt: skip


def test_a_new_method_re_keys_nothing(package: Path) -> None:
    assert not changed(package, "methods/newer.py", lambda text: "from chai_eval.methods.base import Method\n")
    assert not changed(
        package, "methods/__init__.py", lambda text: text + "\nfrom chai_eval.methods.newer import Method\n"
    )


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("scoring/prepare.py", "has no documents", "holds no document at all"),
        ("scoring/lm.py", "requests are longer than", "prompts do not fit into"),
        ("attention/inject.py", "another method is applied to this model", "there is a method already"),
        ("attention/masks.py", '"in both directions"', '"in either of the two directions"'),
        ("methods/base.py", "Refuse a model that", "Say no to a model that"),
    ],
)
def test_another_wording_re_keys_nothing(package: Path, path: str, old: str, new: str) -> None:
    assert not changed(package, path, replaced(old, new))


def test_comments_and_layout_re_key_nothing(package: Path) -> None:
    assert not changed(package, "attention/linkage.py", lambda text: f"# Before all else.\n\n\n{text}\n\n# The end.\n")


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("attention/linkage.py", "TIE = ", "TIE = 2 * "),
        ("attention/kernels/prefill.py", "BLOCK_QUERIES = 256", "BLOCK_QUERIES = 128"),
        ("scoring/pack.py", "LEAST_SHARE, MOST_REQUESTS = 1 / 8, 4", "LEAST_SHARE, MOST_REQUESTS = 1 / 8, 5"),
        ("scoring/compare.py", "argmax(-1)", "argmax(1)"),
    ],
)
def test_an_edit_to_attention_or_the_scorer_re_keys_everything(package: Path, path: str, old: str, new: str) -> None:
    assert changed(package, path, replaced(old, new)) == set(METHODS)


def test_a_file_that_is_no_python_re_keys_everything(package: Path) -> None:
    assert changed(package, "attention/kernels/attend.cu", lambda text: "// a kernel\n") == set(METHODS)


@pytest.mark.parametrize(
    "line", ["__import__('importlib').import_module(name)", "exec(name)", "from . import chai as found"]
)
def test_a_method_that_may_import_anything_depends_on_everything(package: Path, line: str) -> None:
    file = package / "methods" / "head_prune.py"
    file.write_text(f"{file.read_text(encoding='utf-8')}\n\ndef found(name):\n    {line}\n", encoding="utf-8")
    assert changed(package, "methods/spatten.py", replaced("ALWAYS = 1e30", "ALWAYS = 1e29")) == {
        "spatten", "head_prune",
    }  # fmt: skip


def test_imports_for_type_checkers_do_not_count(package: Path) -> None:
    def typed(text: str) -> str:
        return text.replace("from typing import", "from typing import TYPE_CHECKING,") + (
            "\nif TYPE_CHECKING:\n    from chai_eval.methods.spatten import SpAtten\n"
        )

    before = NumericCode.of(package).closure("chai_eval.methods.dejavu")
    file = package / "methods" / "dejavu.py"
    file.write_text(typed(file.read_text(encoding="utf-8")), encoding="utf-8")
    assert NumericCode.of(package).closure("chai_eval.methods.dejavu") == before
