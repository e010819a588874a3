"""`python -m chai_eval`: see `chai_eval.cli`."""

from __future__ import annotations

import sys

from chai_eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
