"""A machine with torch and transformers, and nothing else of ours, can measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from importlib.machinery import PathFinder

absent = {absent}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in absent else find(name, path, target)
)
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
assert not absent & {{name.partition(".")[0] for name in sys.modules}}
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


def test_measuring_needs_neither_lm_eval_nor_hydra_nor_anything_for_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(absent=ABSENT), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| chai " in done.stdout
    assert "| decode attention " in done.stdout
