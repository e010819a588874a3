"""Scoring: the bridge to lm-eval."""
