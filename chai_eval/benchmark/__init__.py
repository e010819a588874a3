"""Benchmarks that reproduce the numbers the project promises, one command each; `benchmark.all` runs all.

Every figure is a ratio of medians, measured side by side in one process, with contenders in turn; the table stands
beside what is the most that can be had. Records go to `results/benchmarks/`; those that were published stand in
`results/records/benchmarks/`.
"""
