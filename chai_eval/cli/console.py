"""What may appear on stderr: our own lines, and nobody else's chatter."""

from __future__ import annotations

import logging
import os
import sys


def quiet_libraries() -> None:
    """Send our own progress to stderr as it is, and keep other libraries' chatter out of it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("chai_eval")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for noisy in ("lm_eval", "lm-eval", "transformers", "datasets", "accelerate", "httpx", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
