"""Clustered attention: the heart of the package. Needs torch (and transformers to enter a model), nothing else."""

from __future__ import annotations

from chai_eval.attention.cache import ClusteredCache
from chai_eval.attention.hooks import Composed, Hooks, Prefill, apply
from chai_eval.attention.inject import take_over
from chai_eval.attention.layer import full_attention, shared_attention, stored
from chai_eval.attention.masks import Chunk, UnsupportedModel
from chai_eval.attention.membership import Membership, membership_from_labels, membership_of
from chai_eval.attention.passes import AttentionCall, Takeover
from chai_eval.attention.probe import probe_features, probe_probabilities
from chai_eval.attention.row_layer import RowLayer
from chai_eval.attention.rows import Rows
from chai_eval.attention.shape import attention_layers
from chai_eval.attention.shards import Shard, shard
from chai_eval.attention.sharing import FixedPlan, Plan, ProbePlan, SharedHeads, side_by_side
from chai_eval.attention.sources import Source
from chai_eval.attention.view import View

__all__ = [
    "AttentionCall",
    "Chunk",
    "ClusteredCache",
    "Composed",
    "FixedPlan",
    "Hooks",
    "Membership",
    "Plan",
    "Prefill",
    "ProbePlan",
    "RowLayer",
    "Rows",
    "Shard",
    "SharedHeads",
    "Source",
    "Takeover",
    "UnsupportedModel",
    "View",
    "apply",
    "attention_layers",
    "full_attention",
    "membership_from_labels",
    "membership_of",
    "probe_features",
    "probe_probabilities",
    "shard",
    "shared_attention",
    "side_by_side",
    "stored",
    "take_over",
]
