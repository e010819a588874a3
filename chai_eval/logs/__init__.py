"""Logs of runs, whoever made them: lm-eval's own and our results, read alike, written as lm-eval does, compared."""
