"""Typed settings of the offline phase; a wrong value is one line in the user's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from chai_eval.errors import SettingError
from chai_eval.schema import SETTINGS, TEXTS, Count, Flag, Folder, Recorded, Text, Whole, group, setting
from chai_eval.settings import ModelSettings, parse_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Algorithm = Literal["kmeans", "average"]
FeatureKind = Literal["last_row", "probe"]

ToHalf = Annotated[float, Field(strict=True, ge=0, le=0.5)]
ToOne = Annotated[float, Field(strict=True, ge=0, le=1)]
ToTwo = Annotated[float, Field(strict=True, ge=0, le=2)]
BY_PRESET = "for conservative, balanced, aggressive"


def _counts(given: Any) -> Any:
    # Methods need torch, which takes seconds to import: a mistyped setting is told before.
    from chai_eval.methods.clusters import check_clusters

    if given is not None:
        check_clusters(given)
    return given


@dataclass(frozen=True, config=SETTINGS)
class OfflineSettings(Recorded):
    """What calibration and analysis are both told."""

    left_out = ("model", "debug", "out")

    model: Annotated[ModelSettings, group(parse_model)]
    text: Text = setting("auto", TEXTS)
    samples: Count = setting(1024, "samples of text")
    tokens: Annotated[int, Field(strict=True, ge=8)] = setting(256, "tokens of each sample")
    seed: Whole = setting(1234, "order of the text, and everything that is drawn")
    features: FeatureKind = setting(
        "last_row",
        "what the error curves compare heads by: last_row (the last token's attention), probe (that of the first "
        "tokens)",
    )
    algorithm: Algorithm = setting("kmeans", "how heads are clustered for the error curves: kmeans, average (linkage)")
    starts: Count = setting(10, "starts of K-Means, the best of which counts")
    probe_tokens: Count = setting(5, "tokens of the probe")
    batch_tokens: Count = setting(2048, "tokens in one pass")
    out: Folder | None = setting(
        None, "folder to write to; null for the user's cache, where methods find it by the model's name"
    )
    debug: Flag = setting(False, "true shows the traceback of an unexpected error")


@dataclass(frozen=True, config=SETTINGS)
class CalibrationSettings(OfflineSettings):
    """Everything that a calibration is told."""

    query_rows: Count = setting(
        16, "queries of each sample from which the cost of serving one head by another is measured"
    )
    predictor: Flag = setting(
        True, "train DejaVu's predictors of heads as well; false leaves them out, they take most of the file"
    )
    sensitivity_samples: Count = setting(
        192, "of the samples, how many tell how much predictions change when a layer is clustered"
    )
    only: Literal["clusters", "moments"] | None = setting(
        None, "clusters (all but the moments) or moments (what kv_rank and layer_share need, in minutes); null for both"
    )
    rule: Literal["budget", "elbow", "tolerance"] = setting(
        "budget",
        "how counts are chosen: budget (least cost for a saving), elbow (of each layer's curve), tolerance (of each "
        "layer's error)",
    )
    saving: tuple[ToHalf, ToHalf, ToHalf] = setting(
        (0.07, 0.14, 0.21),
        "rule=budget: share of the K,V cache to save, by preset: conservative, balanced, aggressive",
        allowed=f"three numbers from 0 to 0.5, {BY_PRESET}",
    )
    elbow: tuple[ToTwo, ToTwo, ToTwo] = setting(
        (0.5, 1.0, 1.25),
        "rule=elbow: how far from all heads to the elbow, by preset; 1 is the elbow",
        allowed=f"three numbers from 0 to 2, {BY_PRESET}",
    )
    tolerance: tuple[ToOne, ToOne, ToOne] = setting(
        (0.05, 0.1, 0.2),
        "rule=tolerance: largest error, as a share of the error of a single cluster, by preset",
        allowed=f"three numbers from 0 to 1, {BY_PRESET}",
    )

    def collecting(self) -> dict[str, Any]:
        """Settings that have a say in what is collected; the rule comes after it."""
        later = ("only", "rule", "saving", "elbow", "tolerance")
        return {key: value for key, value in self.as_config().items() if key not in later}


@dataclass(frozen=True, config=SETTINGS)
class AnalysisSettings(OfflineSettings):
    """Everything that an analysis is told."""

    samples: Count = setting(128, "samples of text")
    longest_probe: Count = setting(64, "membership is followed over probes of 1 to so many tokens")
    counts: Annotated[Any, AfterValidator(_counts)] = setting(
        None, "cluster counts whose membership is followed: a preset or a list; null for each layer's elbow"
    )
    drift: Flag = setting(
        False,
        "true follows, over windows further on in each sample, how far their clusters agree with those of the first "
        "tokens",
    )
    window: Count | None = setting(None, "tokens of such a window; null for as many as the probe has")
    figures: Flag | None = setting(
        None, "draw figures as well as writing the data: true, false; null where matplotlib is installed"
    )
    out: Folder | None = setting(None, "folder to write to; null for results/analysis/<model>")


def check_tokens(tokens: int, model: PreTrainedModel) -> None:
    """Refuse samples that are longer than the model reads, by a SettingError."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise SettingError(f"tokens: {tokens} given; allowed: 8 to {longest}, the longest this model reads")
