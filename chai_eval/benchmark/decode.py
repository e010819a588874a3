"""Decoding: one new token against a cache, one clustered layer against plain attention on all heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chai_eval.benchmark.attention import row
from chai_eval.benchmark.common import DTYPES, Row, finish, numbers, parser

# By dtype, on a CPU; SDPA's decode path in bfloat16 is slow there.
REACH = {"float32": 1.70, "bfloat16": 4.0}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Time every length and precision, print the table, write the record."""
    options = parser(__doc__, repetitions=31)
    options.add_argument("--keys", type=numbers, default=[2048, 4096, 8192])
    options.add_argument("--clusters", type=int, default=4)
    options.add_argument("--dtypes", default="float32,bfloat16")
    arguments = options.parse_args(given)
    device = torch.device(arguments.device)
    rows = [
        row(
            "decode attention", 1, keys, arguments.clusters, DTYPES[dtype], device,
            repetitions=arguments.repetitions, reach=REACH.get(dtype) if device.type == "cpu" else None,
        )
        for dtype in arguments.dtypes.split(",")
        for keys in arguments.keys
    ]  # fmt: skip
    return finish("decode", rows, arguments)


if __name__ == "__main__":
    main()
