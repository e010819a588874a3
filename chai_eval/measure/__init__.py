"""Latency and memory, measured so that they can be believed; needs torch and transformers, nothing else.

`grid.measure` is the way in from Python, `chai-eval measure` from the command line, and `measure=full` within
a run that scores. What is measured, and how:

- `latency`: time to first token and per token of a greedy generation, methods in turn;
- `memory`: bytes of the cache, and peak memory of the device or of a fresh process, in a pass of their own;
- `ceiling`, `work`: what the machine can do, and what each phase asks of it at least.
"""
