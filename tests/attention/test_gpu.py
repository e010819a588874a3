"""When the kernels of a GPU are taken, on stand-ins for tensors of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chai_eval.attention import Rows, View
from chai_eval.attention.kernels import gpu


def states(**different: Any) -> Any:
    device = torch.device("cuda", 0)
    usual = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 4, 1, 128), "requires_grad": False}
    return SimpleNamespace(device=device, **{**usual, **different})


def seen(contexts: list[int], branches: list[list[int]], chosen: torch.Tensor | None = None) -> View:
    return View(Rows.packed(contexts, branches), 0.1, chosen=chosen)


@pytest.mark.parametrize(
    ("expected", "different", "view"),
    [
        (True, {}, seen([5, 9], [[], []])),
        (True, {"dtype": torch.float16}, seen([5, 9], [[3], []])),
        (False, {"is_cuda": False}, seen([5], [[]])),
        (False, {"dtype": torch.float64}, seen([5], [[]])),
        (False, {"shape": (1, 4, 1, 512)}, seen([5], [[]])),
        (False, {"requires_grad": True}, seen([5], [[]])),
        (False, {}, seen([5], [[2, 3]])),
        (False, {}, seen([5], [[]], torch.ones(1, 1, 5, 5, dtype=torch.bool))),
    ],
)
def test_what_the_kernels_do_not_compute_is_left_to_pytorch(
    expected: bool, different: dict[str, Any], view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "compiles_for", lambda device: True)
    given = states(**different)
    assert gpu.takes(given, given, given, view) is expected
    monkeypatch.setattr(gpu, "compiles_for", lambda device: False)
    assert not gpu.takes(given, given, given, view)


def test_a_gradient_that_nobody_asked_for_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "compiles_for", lambda device: True)
    given = states(requires_grad=True)
    with torch.no_grad():
        assert gpu.takes(given, given, given, seen([5], [[]]))
