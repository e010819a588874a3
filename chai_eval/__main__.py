"""`python -m chai_eval`: see `chai_eval.cli`."""

from __future__ import annotations

import os
import sys

from chai_eval.cli import main

if __name__ == "__main__":
    status = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Threads that gloo leaves behind can abort a process that ends in the ordinary way, with its work done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
