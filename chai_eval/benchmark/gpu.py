"""Everything worth knowing of a GPU within minutes: correctness, attention, a model of LLaMA-7B's shape.

Needs torch and transformers (5.17 or later), nothing else: `python -m chai_eval.benchmark.gpu` in a checkout. What
matters most comes first, rows are written as they are found, and it stops in time. Without a GPU, or with `--tiny`, it
runs the same at sizes that take seconds and mean nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from chai_eval.benchmark import gpu_attention, gpu_model
from chai_eval.benchmark.gpu_attention import Shape
from chai_eval.benchmark.gpu_report import GpuRow, Report, measured
from chai_eval.benchmark.records import OWN, parser, positive
from chai_eval.errors import RunError, failure_line

CLUSTERS = 4
# Lengths and batches, those that say most first, with the seconds that they take at most.
POINTS = (
    (2048, 1, 25), (2048, 8, 30), (512, 1, 15), (8192, 1, 30), (2048, 32, 60), (512, 8, 20), (8192, 8, 60),
    (512, 32, 30), (8192, 32, 90),
)  # fmt: skip
TINY = ((24, 2, 0),)


def main(given: Sequence[str] | None = None) -> list[GpuRow]:
    """Run it, print the table, write the record."""
    options = parser("gpu", __doc__, out=OWN)
    options.add_argument("--tiny", action="store_true", help="sizes that take seconds; so it is without a GPU")
    options.add_argument("--seconds", type=positive, default=420, help="no part begins that would end later")
    arguments, started = options.parse_args(given), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu")
    tiny = device.type == "cpu"
    dtypes = [torch.float32] if tiny else [torch.bfloat16, torch.float16]
    for dtype in dtypes:
        for queries in (1, 40):
            gpu_attention.check(Shape(queries, 40 if tiny or queries > 1 else 700, 2, CLUSTERS, dtype, device))
    report = Report(
        arguments.out / "gpu.json", measured(device, dtypes[0], tiny=tiny), arguments.seconds, tiny, started=started
    )
    copied, products = report.machine.bytes_per_second / 1e9, report.machine.flops_per_second / 1e12
    print(f"{report.machine.name}: copies {copied:.0f} GB/s, multiplies {products:.3g} TFLOP/s", flush=True)
    report.facts["correct"] = "decode and prefill attention equal SDPA's"
    _measure(report, device, dtypes)
    print(report.table())
    print(f"written to {report.path}")
    return report.rows


def _measure(report: Report, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    points, repetitions = (TINY, 2) if report.tiny else (POINTS, 5)
    model = gpu_model.random_model(device, tiny=report.tiny)

    def whole(length: int, batch: int, seconds: int) -> None:
        report.part(
            f"model, {length} tokens, batch {batch}",
            seconds,
            partial(gpu_model.timed, model, report, length, batch, 2 if report.tiny else 3),
        )

    def layer(length: int, batch: int, dtype: torch.dtype, *, prompt: bool) -> None:
        shape = Shape(length if prompt else 1, length, batch, CLUSTERS, dtype, device)
        flex = not report.tiny and dtype == dtypes[0]
        work = partial(gpu_attention.timed, shape, report, repetitions=repetitions, with_flex=flex)
        report.part(f"{'prefill' if prompt else 'decode'}, {shape.text}", 0 if report.tiny else 12, work)

    for number, (length, batch, seconds) in enumerate(points):
        whole(length, batch, seconds)
        layer(length, batch, dtypes[0], prompt=False)
        if number < 4:
            layer(length, batch, dtypes[0], prompt=True)
    for length, batch, _ in points if len(dtypes) > 1 else ():
        layer(length, batch, dtypes[1], prompt=False)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(failure_line(error))
