"""`python -m chai_eval.benchmark`: what `python -m chai_eval benchmark` runs, on a machine without what that needs."""

from __future__ import annotations

import sys

from chai_eval.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
