"""Which model types methods can be put into: each built small, and compared with the stock model; not a measurement.

`python -m chai_eval.benchmark.models` writes what it finds to `docs/models.md`.
"""
