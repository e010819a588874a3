"""Prefill: a whole prompt at once, one clustered layer against plain attention on all heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chai_eval.benchmark.attention import row
from chai_eval.benchmark.common import DTYPES, Row, finish, numbers, parser

REACH = {"float32": 1.75}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Time every length and precision, print the table, write the record."""
    options = parser(__doc__, repetitions=15)
    options.add_argument("--queries", type=numbers, default=[1024])
    options.add_argument("--clusters", type=int, default=4)
    options.add_argument("--dtypes", default="float32")
    arguments = options.parse_args(given)
    device = torch.device(arguments.device)
    rows = [
        row(
            "prefill attention", queries, queries, arguments.clusters, DTYPES[dtype], device,
            repetitions=arguments.repetitions, reach=REACH.get(dtype) if device.type == "cpu" else None,
        )
        for dtype in arguments.dtypes.split(",")
        for queries in arguments.queries
    ]  # fmt: skip
    return finish("prefill", rows, arguments)


if __name__ == "__main__":
    main()
