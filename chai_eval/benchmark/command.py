"""`python -m chai_eval benchmark NAME [options]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from chai_eval.errors import RunError, SettingError, failure_line

# Where each is, and what it does. They are imported when they are asked for: some need packages that others don't.
BENCHMARKS = {
    "decode": ("attention:decode", "one new token against a cache: a clustered layer against plain attention"),
    "prefill": ("attention:prefill", "a whole prompt at once, likewise"),
    "low_rank": ("low_rank:main", "one new token against a cache: keys in fewer numbers against plain attention"),
    "cache_bytes": ("model:cache_bytes", "K,V bytes after the probe: allocated, by formula, held by a fresh process"),
    "membership": ("membership:main", "memberships of many requests against scipy and scikit-learn"),
    "scoring": ("scoring:main", "the five tasks: our MHA against stock lm-eval, CHAI against our MHA"),
    "model": ("model:main", "TTFT, TPOT and memory of a model with random weights"),
    "gpu": ("gpu:main", "attention and a model of LLaMA-7B's shape on a GPU, within minutes; tiny without one"),
    "all": ("all:main", "all of these, and one table"),
    "machines": ("machines:main", "what is promised, and what every machine that left records reached"),
    "fidelity": ("fidelity:main", "how far each method's predictions move, at one saving"),
    "probe_precision": ("probe_precision:main", "what clusters found in bfloat16 cost"),
    "recluster": ("recluster:main", "what moving heads between clusters wins further on in a text"),
    "tensor_parallel": ("tensor_parallel:main", "what clusters local to each of several devices cost"),
    "models": ("models.command:main", "which models methods can be put into: writes docs/models.md"),
}
NAMES = "\n".join(f"  {name:<16} {about}" for name, (_, about) in BENCHMARKS.items())
USAGE = f"usage: python -m chai_eval benchmark NAME [options]; NAME --help lists its options\n\n{NAMES}\n"


def main(given: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, with the options after it; return the exit status."""
    name, *options = given or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    try:
        if name not in BENCHMARKS:
            raise SettingError(f"benchmark: {name!r} given; allowed: {', '.join(BENCHMARKS)}")
        module, function = BENCHMARKS[name][0].split(":")
        found = getattr(import_module(f"chai_eval.benchmark.{module}"), function)(options)
        return found if isinstance(found, int) else 0
    except (SettingError, RunError) as error:
        sys.stderr.write(failure_line(error) + "\n")
        return 2 if isinstance(error, SettingError) else 1
