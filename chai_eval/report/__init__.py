"""What a reader sees: differences with their intervals, tables, the paper's figures beside ours."""

from __future__ import annotations

from chai_eval.report.paper import published
from chai_eval.report.statistics import Difference, paired_difference
from chai_eval.report.tables import Header, Row, render, render_sweep

__all__ = ["Difference", "Header", "Row", "paired_difference", "published", "render", "render_sweep"]
