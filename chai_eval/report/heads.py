"""Which heads of a model share, and how strongly, from a stored analysis or calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from chai_eval.checksum import Document, read_document
from chai_eval.data.assets import cache_dir
from chai_eval.errors import RunError
from chai_eval.report.records import Stored
from chai_eval.resources import conf_dir

# Of a calibration's three, the one that methods use unless they are told another.
PRESET = "balanced"


@dataclass(frozen=True)
class Heads:
    """How alike a model's heads attend, and which of them share.

    Attributes
    ----------
    similarity : ndarray [layers, heads, heads]
    membership : ndarray [layers, heads]
        For each head a number that those of its cluster have.
    measure, clusters, made : str
        What similarity is, what clusters are, and the command that made the record.
    path : Path
        Of the record.
    """

    model: str
    similarity: NDArray[np.float64]
    membership: NDArray[np.int64]
    measure: str
    clusters: str
    made: str
    path: Path

    def layer(self, number: int) -> list[tuple[list[int], float | None]]:
        """Clusters of a layer: their heads, and the mean similarity of two of them (None for a head by itself)."""
        groups: dict[int, list[int]] = {}
        for head, cluster in enumerate(self.membership[number].tolist()):
            groups.setdefault(cluster, []).append(head)
        found = []
        for members in groups.values():
            square = self.similarity[number][np.ix_(members, members)]
            above = square[np.triu_indices(len(members), 1)]
            found.append((members, float(above.mean()) if above.size else None))
        return found

    def means(self) -> tuple[float, float]:
        """Mean similarity of two heads of a layer that share, and of two that don't; nan where there are none."""
        same = self.membership[:, :, None] == self.membership[:, None, :]
        upper = np.triu(np.ones(same.shape[1:], dtype=bool), 1)[None]
        shared, apart = self.similarity[same & upper], self.similarity[~same & upper]
        return (float(shared.mean()) if shared.size else np.nan, float(apart.mean()) if apart.size else np.nan)


def heads_of(model: str, analyses: Sequence[Stored], left_out: list[str]) -> Heads | None:
    """From an analysis of the model where there is one, else from its calibration: one that ships, or the user's.

    A damaged calibration is named in `left_out`.
    """
    calibrated = _calibration(model, left_out)
    for each in analyses:
        if each.content["model"]["name"] == model:
            return _analysed(model, each, calibrated)
    return calibrated


def _calibration(model: str, left_out: list[str]) -> Heads | None:
    for root in (conf_dir() / "calibration", cache_dir() / "calibration"):
        folder = root / model
        if not (folder / "calibration.json").is_file():
            continue
        try:
            document = read_document(folder / "calibration.json")
            tensors = _tensors(folder, document)
            distance, membership = tensors["distance.last_row"], tensors[f"static_membership.{PRESET}"]
        except (RunError, OSError, KeyError, ValueError) as error:
            left_out.append(f"{folder / 'calibration.json'}: {error}")
            continue
        made = document.content["provenance"]
        return Heads(
            model, 1 - distance.astype(float), membership, "Cosine similarity of two heads' attention",
            f"those of chai_static, preset {PRESET}, on {made['text']}", made["command"], folder / "calibration.json",
        )  # fmt: skip
    return None


def _tensors(folder: Path, document: Document) -> dict[str, NDArray[Any]]:
    document.check(folder, "calibration.safetensors")
    return dict(load_file(folder / "calibration.safetensors"))


def _analysed(model: str, found: Stored, calibrated: Heads | None) -> Heads:
    table = found.tables["head_correlation"]
    layers, heads = (int(table[name].max()) + 1 for name in ("layer", "head"))
    ordered = table.sort_values(["layer", "head", "other"])["correlation"].to_numpy(float)
    correlation = ordered.reshape(layers, heads, heads)
    made, counts = found.content["provenance"], found.content["clusters"]
    measure = "Pearson correlation of two heads' attention of the last token"
    if calibrated is not None and calibrated.membership.shape == (layers, heads):
        membership, clusters = calibrated.membership, calibrated.clusters
    else:
        squares = zip(correlation, counts, strict=True)
        membership = np.stack([_linked(square, count) for square, count in squares])
        clusters = "average linkage of these correlations, as many as the analysis counts"
    path = found.path / "analysis.json"
    return Heads(model, correlation, membership, measure, clusters, made["command"], path)


def _linked(correlation: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    distance = np.clip(1 - (correlation + correlation.T) / 2, 0, None)
    np.fill_diagonal(distance, 0)
    return fcluster(linkage(squareform(distance, checks=False), "average"), count, "maxclust").astype(np.int64)
