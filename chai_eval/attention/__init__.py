"""Clustered attention: the heart of the package. Needs torch (and transformers to enter a model), nothing else."""

from __future__ import annotations

from chai_eval.attention.cache import ClusteredCache
from chai_eval.attention.clustered import clustered_attention, full_attention, shared_attention
from chai_eval.attention.inject import attention_layers, take_over
from chai_eval.attention.masks import Chunk, UnsupportedModel
from chai_eval.attention.membership import Membership, membership_from_labels, membership_of
from chai_eval.attention.passes import ForwardPass, Layer, Takeover
from chai_eval.attention.planned import clustered
from chai_eval.attention.probe import probe_features, probe_probabilities
from chai_eval.attention.probed import Plan
from chai_eval.attention.row_layer import RowLayer
from chai_eval.attention.rows import Rows

__all__ = [
    "Chunk",
    "ClusteredCache",
    "ForwardPass",
    "Layer",
    "Membership",
    "Plan",
    "RowLayer",
    "Rows",
    "Takeover",
    "UnsupportedModel",
    "attention_layers",
    "clustered",
    "clustered_attention",
    "full_attention",
    "membership_from_labels",
    "membership_of",
    "probe_features",
    "probe_probabilities",
    "shared_attention",
    "take_over",
]
