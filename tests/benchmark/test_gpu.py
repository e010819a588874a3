"""The GPU script stops at a wrong result, keeps to its time, and loses nothing; no time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from chai_eval.benchmark import command, gpu_model
from chai_eval.benchmark.gpu_attention import Shape, Tensors
from chai_eval.benchmark.gpu_report import GpuRow, Machine, Report
from chai_eval.measure.work import Pass, pass_work, total
from chai_eval.methods import build_method

CPU = torch.device("cpu")


def report(path: Path, budget: float = 60) -> Report:
    return Report(path / "gpu.json", Machine("a machine", 1e9, 1e12), budget, tiny=True)


def test_a_wrong_result_ends_the_script_in_one_line_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tensors, "clustered", lambda each: each.value[:, :, : each.query.shape[2]])
    assert command.main(["gpu", "--tiny", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("gpu: clustered decode attention is ")
    assert not (tmp_path / "gpu.json").exists()


def test_what_there_is_no_time_or_memory_for_is_left_out_and_rows_so_far_are_written(tmp_path: Path) -> None:
    found, ran = report(tmp_path), []

    def fails() -> None:
        found.add(GpuRow("TTFT", "here", "mha", [0.2, 0.4, 0.3], 0.15))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    found.part("first", 1, fails)
    found.part("second", 100, lambda: ran.append("second"))
    record = json.loads(found.path.read_text())
    assert ran == []
    assert record["left_out"][0] == "first: out of memory"
    assert record["left_out"][1].startswith("second: no time")
    assert (record["rows"][0]["median"], record["rows"][0]["share"]) == (0.3, 0.5)


def test_limits_of_the_model_are_those_that_a_measurement_counts() -> None:
    model = gpu_model.random_model(CPU, tiny=True)
    heads = model.config.num_attention_heads
    for rival in gpu_model.rivals(model)[:3]:
        method = build_method("chai", clusters=rival.scores) if set(rival.scores) != {heads} else build_method("mha")
        footprint = method.footprint(model)
        assert footprint is not None
        ours = gpu_model.work(model, rival, 3, 1, 20)
        theirs = total(pass_work(model, footprint, Pass(3, 1, past=20)))
        # The new tokens' keys and values are written once there, and read besides.
        assert ours[0] == pytest.approx(theirs.bytes, rel=0.05)
        assert ours[1] == pytest.approx(theirs.flops, rel=0.01)


def test_limits_of_attention_count_heads_that_are_kept() -> None:
    shape = Shape(1, 100, 2, 4, torch.float16, CPU)
    plain, few = (shape.work(clusters)[0] for clusters in (32, 4))
    assert plain / few == 64 / 36
    assert plain == 2 * 2 * 64 * 128 * (100 + 1)


# The interpreter is chosen when triton is imported, so it has a process of its own.
INTERPRETED = """
import torch
from chai_eval.benchmark.gpu_attention import Shape, Tensors, compiled

tensors = Tensors.of(Shape(1, 70, 2, 4, torch.float32, torch.device("cpu")))
for kernel in compiled().values():
    torch.testing.assert_close(kernel(tensors), tensors.expected(), atol=1e-5, rtol=1e-4)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_are_given_what_sdpa_is() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
