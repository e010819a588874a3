"""The paper's tables and figures by name: `python -m chai_eval +experiment=NAME`, a file each in `conf/experiment/`.

`plan` says what an experiment is, `command` carries one out: `scores` (a sweep that scores), `heads` and `membership`
(what is seen of heads), `measured` (memory and latency) find what it shows, `paper` holds that against the paper's
figures, `figures` draws it.
"""
