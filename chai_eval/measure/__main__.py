"""`python -m chai_eval.measure`: latency and memory alone, without scoring; see `chai_eval.measure.command`."""

from __future__ import annotations

import sys

from chai_eval.measure.command import main

if __name__ == "__main__":
    sys.exit(main())
