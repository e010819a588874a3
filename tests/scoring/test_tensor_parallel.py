"""A model split over two processes against the same in one, whose clusters are found within each half of the heads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch

from chai_eval.cli import main
from tests.kill_and_resume import results, write_documents
from tests.scoring.split_model import METHODS, as_parts, load_split, said, write_model
from tests.scoring.test_ranks import ENVIRONMENT, ROOT, TORCHRUN


def test_two_processes_say_what_one_says_with_clusters_of_each_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    write_documents(tmp_path / "documents", 4)
    asked = [
        f"path={tmp_path / 'model'}", "tokenizer=builtin", "device=cpu", "dtype=float32", "model.untie=true",
        "task=piqa", f"data_dir={tmp_path / 'documents'}", "limit=null", "batch_tokens=64", "fidelity=2",
        "method=chai", "method.clusters=[8,5,1]",
    ]  # fmt: skip
    in_two = [*asked, "model.tensor_parallel=true", f"results_dir={tmp_path / 'two'}"]
    script = ["-m", "tests.scoring.split_model", str(tmp_path), *in_two]
    split = subprocess.run(
        [*TORCHRUN, *script], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, check=False, timeout=300
    )
    assert split.returncode == 0, split.stderr
    assert main([*asked, "method.tensor_parallel=2", f"results_dir={tmp_path / 'one'}"]) == 0

    # A run: the same table, from results of the same names, with scores that are rounded in another order.
    assert split.stdout == capsys.readouterr().out.replace("/one/", "/two/")
    one, two = (results(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, (record, tables) in two.items():
        assert record["processes"] == 2
        for ours, expected in zip(tables, one[name][1], strict=True):
            pd.testing.assert_frame_equal(pd.DataFrame(ours), pd.DataFrame(expected), rtol=1e-4, atol=1e-5)

    # In float64: both ranks the same, to the bit what one process adds up from the same parts, and up to rounding what
    # it gets from whole matrices, whose sums have another order.
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    whole = said(load_split(tmp_path / "model", tensor_parallel=False), tensor_parallel=2)
    parts = said(as_parts(load_split(tmp_path / "model", tensor_parallel=False), 2), tensor_parallel=2)
    for name in METHODS:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], parts[name])
        torch.testing.assert_close(first[name], whole[name], rtol=0, atol=1e-12 * float(whole[name].abs().max()))
        assert name == "mha" or not torch.allclose(whole[name], whole["mha"], atol=0.1)
    anywhere = said(load_split(tmp_path / "model", tensor_parallel=False))
    assert not torch.allclose(anywhere["chai"], whole["chai"], atol=0.1)
