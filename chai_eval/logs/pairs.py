"""Documents of two logs, put together by what they are: never by their place in a file."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from chai_eval.errors import RunError

IDENTITY = ("doc_id", "doc_hash", "prompt_hash")


@dataclass(frozen=True)
class Pairs:
    """Two logs' rows about the same documents.

    Attributes
    ----------
    first, second
        Rows of each log, every document once, by doc_id.
    places
        Of each pair, the places in `first` and in `second`.
    remarks
        What there is to say about documents that have no other, or that stand twice, or were asked about otherwise.
    """

    first: pd.DataFrame
    second: pd.DataFrame
    places: list[tuple[int, int]]
    remarks: list[str]


def pair(task: str, column: str, first: pd.DataFrame, second: pd.DataFrame) -> Pairs:
    """Pair the documents that have a score in both logs.

    By doc_hash, and where several documents are alike, in the order of their doc_id; by doc_id and prompt_hash where a
    log has no hashes of documents.

    Parameters
    ----------
    column
        Of the score.
    first, second
        Rows as `TaskLog.samples` has them, under one filter.

    Raises
    ------
    RunError
        A log has no hashes, or a document twice with different scores.
    """
    remarks: list[str] = []
    one, two = (_once(task, column, name, rows, remarks) for name, rows in (("A", first), ("B", second)))
    keys = _keys(task, one, two)
    matched = keys[0].merge(keys[1], how="outer", on=list(keys[0].columns.difference(["place"])), indicator=True)
    alone = [int((matched["_merge"] == side).sum()) for side in ("left_only", "right_only")]
    if any(alone):
        remarks.append(f"{task}: {alone[0]} documents only in A, {alone[1]} only in B; they are left out")
    both = matched[matched["_merge"] == "both"].sort_values("place_x")
    places = list(zip(both["place_x"].astype(int), both["place_y"].astype(int), strict=True))
    remarks += _prompts(task, one, two, places)
    return Pairs(one, two, places, remarks)


def _once(task: str, column: str, name: str, rows: pd.DataFrame, remarks: list[str]) -> pd.DataFrame:
    """Each document's row, by doc_id."""
    rows = rows[rows[column].notna()]
    identity = [each for each in IDENTITY if each in rows]
    again = rows.duplicated(identity)
    if again.any():
        if len(rows[[*identity, column]].drop_duplicates()) > (~again).sum():
            twice = rows[rows.duplicated(identity, keep=False)]["doc_id"].iloc[0]
            raise RunError(f"{task}: {name} has document {twice} twice, with different {column}; its log is damaged")
        remarks.append(f"{task}: {name} has {int(again.sum())} documents twice; each counts once")
    return rows[~again].sort_values("doc_id", kind="stable", ignore_index=True)


def _keys(task: str, first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What documents are known by, and the place of each."""
    both = first, second
    if all("doc_hash" in each and each["doc_hash"].notna().all() for each in both):
        return tuple(
            pd.DataFrame(
                {"hash": each["doc_hash"], "nth": each.groupby("doc_hash").cumcount(), "place": range(len(each))}
            )
            for each in both
        )  # type: ignore[return-value]
    if not all("prompt_hash" in each and each["prompt_hash"].notna().all() for each in both):
        raise RunError(
            f"{task}: a log has neither doc_hash nor prompts to know documents by; "
            "allowed: logs of lm-eval's --log_samples"
        )
    return tuple(
        pd.DataFrame({"doc_id": each["doc_id"], "prompt": each["prompt_hash"], "place": range(len(each))})
        for each in both
    )  # type: ignore[return-value]


def _prompts(task: str, first: pd.DataFrame, second: pd.DataFrame, places: list[tuple[int, int]]) -> list[str]:
    if not places or any("prompt_hash" not in each for each in (first, second)):
        return []
    asked = [frame["prompt_hash"].tolist() for frame in (first, second)]
    other = [one for one, two in places if asked[0][one] != asked[1][two]]
    if not other:
        return []
    return [
        f"{task}: prompts differ for {len(other)} of {len(places)} documents "
        f"(document {first['doc_id'].iloc[other[0]]} is the first), so the difference is that of the prompts as well"
    ]
