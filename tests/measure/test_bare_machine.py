"""A machine with torch and transformers, and nothing else of ours, can measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BARE = """
import sys
from importlib.machinery import PathFinder

absent = {absent}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in absent else find(name, path, target)
)
"""

MEASURE = """
from chai_eval import build_method, load_model
from chai_eval.benchmark.command import main
from chai_eval.measure.contenders import contender
from chai_eval.measure.grid import measure
from chai_eval.measure_settings import MeasureSettings
from chai_eval.measure.table import tables

model, _ = load_model("tiny_llama_random", device="cpu")
chai = contender(build_method("chai", clusters=[[8, 1], [5, 1], [3, 2]]))
settings = MeasureSettings(lengths=(20,), new_tokens=(3,), repetitions=1, warmup=0)
print(tables(measure(model, [chai], settings).record))
for name, option in (("decode", "--keys"), ("prefill", "--queries")):
    assert main([name, option, "40", "--dtypes", "float32", "--repetitions", "1", "--out", sys.argv[1]]) == 0
assert not absent & {name.partition(".")[0] for name in sys.modules}
"""

ABSENT = {
    "lm_eval",
    "hydra",
    "omegaconf",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "statsmodels",
    "rich",
    "psutil",
    "datasets",
    "triton",
}

GPU = """
from chai_eval.benchmark.command import main

assert main(["gpu", "--tiny", "--out", sys.argv[1]]) == 0
"""


def run_without(absent: set[str], code: str, out: Path) -> str:
    """What some code prints, given a folder, where packages can't be found."""
    done = subprocess.run(
        [sys.executable, "-c", BARE.format(absent=absent) + code, str(out)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measuring_needs_neither_lm_eval_nor_hydra_nor_anything_for_reports(tmp_path: Path) -> None:
    said = run_without(ABSENT, MEASURE, tmp_path)
    assert "| chai " in said
    assert "| decode attention " in said


def test_the_gpu_script_needs_torch_and_transformers_alone_and_runs_tiny_without_a_gpu(tmp_path: Path) -> None:
    absent = ABSENT | {"pydantic", "accelerate", "sentencepiece", "jinja2", "PIL", "gguf", "kneed"}
    run_without(absent, GPU, tmp_path)
    record = json.loads((tmp_path / "gpu.json").read_text())
    found = {(row["what"], row["contender"]) for row in record["rows"]}
    contenders = ("mha (sdpa)", "chai, published counts", "chai, 8 → 4", "kv_rank, 8 → 6")
    assert {(what, each) for what in ("TTFT", "TPOT") for each in contenders} <= found
    assert {(f"{kind} attention", each) for kind in ("decode", "prefill") for each in ("sdpa", "clustered")} <= found
    assert record["left_out"] == []
    assert all(row["share"] == row["limit"] / row["median"] for row in record["rows"])
