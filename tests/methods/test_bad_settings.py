"""Wrong settings of the methods that CHAI is compared with: one line each, naming the setting."""

from __future__ import annotations

from typing import Any

import pytest

from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from tests.attention.tiny import HEADS, LAYERS, MODELS

OWN = list(range(HEADS))

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (
        "chai_static",
        {},
        r"method.membership: None given; allowed: .* per layer a list of cluster labels",
    ),
    ("chai_static", {"membership": [OWN] * 2}, r"method.membership: 2 layers given for a model of 3 layers"),
    ("chai_static", {"membership": [OWN, OWN, OWN[:7]]}, r"method.membership: 7 entries given for layer 2; allowed: 8"),
    ("chai_static", {"membership": [OWN, OWN, [-1] * 8]}, r"method.membership: \[\[0.* given; allowed"),
    ("chai_static", {"membership": [OWN, OWN, ["a"] * 8]}, r"method.membership: \[\[0.* given; allowed"),
    ("chai_static", {"membership": [OWN, OWN, 3]}, r"method.membership: \[\[0.* given; allowed"),
    (
        "chai_static",
        {"membership": "nowhere"},
        r"method.membership: no calibration 'nowhere'; .*model=nowhere",
    ),
    ("chai_static", {"membership": [OWN] * 3, "preset": "bold"}, r"method.preset: 'bold' given; allowed: conservative"),
    (
        "chai_static",
        {"membership": [OWN] * 3, "representative": "last"},
        r"method.representative: 'last' given; allowed: first",
    ),
    (
        "chai",
        {"clusters": [8, 3, 1], "tensor_parallel": 0},
        r"method.tensor_parallel: 0 given; allowed: a whole number from 1",
    ),
    (
        "v_reuse",
        {"clusters": [8, 3, 1], "tensor_parallel": 9},
        r"method.tensor_parallel: 9 given for a model of 8 key heads; allowed: 1 to 8",
    ),
    (
        "chai",
        {"clusters": [8, 3, 1], "tensor_parallel": 2, "recluster_every": 16},
        r"method.recluster_every: 16 given with tensor_parallel=2; allowed: 0",
    ),
    (
        "chai_static",
        {"membership": [OWN, OWN, [0, 1, 2, 3, 3, 5, 6, 7]], "tensor_parallel": 2},
        r"method.membership: head 3 given for head 4 of layer 2 with tensor_parallel=2; allowed: heads 4 to 7",
    ),
    ("dejavu", {"tensor_parallel": 2}, r"method.tensor_parallel: no such setting of dejavu; allowed"),
    ("v_reuse", {"clusters": [8, 8, 9]}, r"method.clusters: 9 given for layer 2; allowed: 1 to 8"),
    (
        "output_aware",
        {"membership": [OWN, OWN, [8] * 8]},
        r"method.membership: head 8 given for head 0 of layer 2; allowed: 0 to 7",
    ),
    (
        "output_aware",
        {"membership": [[1, 2, 2, 3, 4, 5, 6, 7], OWN, OWN]},
        r"method.membership: head 1 given for head 0 of layer 0, and for head 1 head 2; allowed",
    ),
    ("output_aware", {"membership": [OWN] * 3, "adaptive": 1}, r"method.adaptive: 1 given; allowed: true, false"),
    ("output_aware", {"membership": [OWN] * 3, "probe_tokens": 0}, r"method.probe_tokens: 0 given; allowed"),
    ("dejavu", {"sparsity": 1}, r"method.sparsity: 1 given; allowed: numbers from 0 to below 1"),
    ("dejavu", {"sparsity": -0.1}, r"method.sparsity: -0.1 given"),
    ("dejavu", {"sparsity": "half"}, r"method.sparsity: 'half' given"),
    ("dejavu", {"sparsity": float("nan")}, r"method.sparsity: nan given"),
    ("dejavu", {"mlp_sparsity": 1.0}, r"method.mlp_sparsity: 1.0 given"),
    ("dejavu", {"selector": "random"}, r"method.selector: 'random' given; allowed: oracle, predictor"),
    ("dejavu", {"selector": "predictor"}, r"method.predictor: None given; .*python -m chai_eval.calibrate model="),
    (
        "dejavu",
        {"selector": "predictor", "predictor": "llama7b"},
        r"method.predictor: no calibration 'llama7b'; .*`python -m chai_eval.calibrate model=llama7b`",
    ),
    ("spatten", {"token_sparsity": 1.5}, r"method.token_sparsity: 1.5 given"),
    ("spatten", {"head_sparsity": True}, r"method.head_sparsity: True given"),
    ("spatten", {"spare_layers": -1}, r"method.spare_layers: -1 given; allowed: whole numbers from 0"),
    ("head_prune", {}, r"method.importance: None given; allowed: a calibration"),
    ("head_prune", {"pruned": [[0]] * LAYERS, "sparsity": 1}, r"method.sparsity: 1 given"),
    ("head_prune", {"pruned": [[0]]}, r"method.pruned: 1 layers given for a model of 3 layers"),
    ("head_prune", {"pruned": [[], [8], []]}, r"method.pruned: head 8 given for layer 1; allowed: 0 to 7"),
    ("head_prune", {"pruned": [[], [-1], []]}, r"method.pruned: .* given; allowed"),
    ("snapkv", {"keep": 0}, r"method.keep: 0 given; allowed: numbers above 0 up to 1"),
    ("snapkv", {"keep": True}, r"method.keep: True given; allowed: numbers above 0 up to 1"),
    ("snapkv", {"every": 16}, r"method.window: 16 given with every=16; allowed: 1 to 15"),
    ("snapkv", {"window": 0}, r"method.window: 0 given; allowed: whole numbers from 1"),
    ("snapkv", {"kernel": 4}, r"method.kernel: 4 given; allowed: odd numbers"),
    ("layer_share", {}, r"method.costs: None given; allowed: a calibration \(or layers in method.layers\)"),
    ("layer_share", {"layers": [0, 1]}, r"method.layers: \[0, 1\] given; allowed: numbers of layers from 1"),
    ("layer_share", {"layers": 1}, r"method.layers: 1 given; allowed: numbers of layers from 1"),
    ("layer_share", {"layers": ["1"]}, r"method.layers: \['1'\] given; allowed: numbers of layers from 1"),
    ("layer_share", {"layers": [3]}, r"method.layers: layer 3 given; allowed: 1 to 2"),
    ("layer_share", {"costs": "nowhere", "count": -1}, r"method.count: -1 given; allowed: whole numbers from 0"),
    ("layer_share", {"costs": "nowhere", "count": 3}, r"method.count: 3 given; allowed: 0 to 2"),
    (
        "layer_share",
        {"costs": "nowhere", "count": 2},
        r"method.costs: no moments in a calibration 'nowhere'; .*model=nowhere",
    ),
    ("pooled_gqa", {"groups": 3}, r"method.groups: 3 given for a model of 8 key heads; allowed: 1, 2, 4, 8"),
    ("quest", {"read": 0}, r"method.read: 0 given; allowed: numbers above 0 up to 1"),
    ("quest", {"page_size": 0}, r"method.page_size: 0 given; allowed: whole numbers from 1"),
    ("quest", {"spare_layers": -1}, r"method.spare_layers: -1 given; allowed: whole numbers from 0"),
    ("quest", {"with": ["key_int8"]}, r"method.with: quest and key_int8 given \(key_int8 has attention of its own"),
    ("key_int8", {"bits": 5}, r"method.bits: 5 given; allowed: 8, 4, 16"),
    ("key_int8", {"bits": "8"}, r"method.bits: '8' given; allowed: 8, 4, 16"),
    ("pooled_gqa", {"groups": 0}, r"method.groups: 0 given; allowed: whole numbers from 1"),
    ("pooled_gqa", {"by": "chance"}, r"method.by: 'chance' given; allowed: neighbours, similarity"),
]


@pytest.mark.parametrize(("method", "settings", "line"), MISTAKES)
def test_a_wrong_setting_is_one_line_that_names_it(
    method: str, settings: dict[str, Any], line: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path))
    with pytest.raises(SettingError, match=line) as error:
        build_method(method, **settings).check(MODELS["llama"]())
    assert "\n" not in str(error.value)


def test_heads_are_not_called_similar_where_their_key_projections_are_not_known() -> None:
    line = r"method.by: similarity given for a gpt_neox model, .*; allowed: neighbours"
    with pytest.raises(SettingError, match=line):
        build_method("pooled_gqa", by="similarity").check_settings(MODELS["neox"]())
