"""Benchmarks that reproduce the numbers the project promises: `python -m chai_eval benchmark NAME`, or `all` of them.

Every figure is a ratio of medians, measured side by side in one process, with contenders in turn; the table stands
beside what is the most that can be had. Records go to `results/benchmarks/`; those that were published stand in
`results/records/benchmarks/`. `decode` and `prefill` need torch and transformers, nothing else.
"""
