"""Tests run offline and on one thread per process; they never write into the checkout."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Our own warnings so far, also where a command that ran before has sent them to stderr."""
    ours = logging.getLogger("chai_eval")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)

    def ours_alone() -> list[str]:
        return [
            each.getMessage()
            for each in caplog.records
            if each.levelno == logging.WARNING and each.name.startswith("chai_eval")
        ]

    return ours_alone
