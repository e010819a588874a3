"""Results on disk: the key that names one, the journal while it is scored, the record when it is finished."""

from __future__ import annotations

from chai_eval.store.code import SCORER, NumericCode
from chai_eval.store.folder import ResultFolder, check_writable, has_results
from chai_eval.store.journal import Journal
from chai_eval.store.key import result_key
from chai_eval.store.record import (
    LAYOUT,
    read_fidelity,
    read_record,
    read_samples,
    write_fidelity,
    write_record,
)

__all__ = [
    "LAYOUT",
    "SCORER",
    "Journal",
    "NumericCode",
    "ResultFolder",
    "check_writable",
    "has_results",
    "read_fidelity",
    "read_record",
    "read_samples",
    "result_key",
    "write_fidelity",
    "write_record",
]
