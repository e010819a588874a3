from __future__ import annotations

from pathlib import Path

import pytest

from chai_eval.calibration_file import calibrated_presets
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.methods.clusters import cluster_counts, preset_runs
from tests.attention.tiny import MODELS


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"clusters": [4, 4]}, r"method.clusters: 2 counts given for a model of 3 layers"),
        ({"clusters": [4, 4, 9]}, r"method.clusters: 9 given for layer 2; allowed: 1 to 8"),
        ({"clusters": [4, 0, 8]}, r"method.clusters: 0 given; allowed: counts from 1"),
        ({"clusters": [[4, 2], [-1, 1]]}, r"method.clusters: \[-1, 1\] given; allowed: counts from 1"),
        ({"clusters": []}, r"method.clusters: \[\] given; allowed: a preset"),
        ({"clusters": "nothing"}, r"method.clusters: no preset 'nothing'; allowed: .*llama7b"),
        ({"clusters": "llama7b"}, r"method.clusters: preset 'llama7b' has 32 counts given for a model of 3"),
        ({"clusters": None}, r"method.clusters: no cluster counts .* chai_eval.calibrate model=<name>"),
        (
            {"clusters": [4, 4, 4], "probe_tokens": 0},
            r"method.probe_tokens: 0 given; allowed: whole numbers from 1",
        ),
        (
            {"clusters": [4, 4, 4], "features": "all"},
            r"method.features: 'all' given; allowed: triangle, full",
        ),
        ({"clusters": [4, 4, 4], "linkage": "ward"}, r"method.linkage: 'ward' given; allowed: average"),
        (
            {"clusters": [4, 4, 4], "representative": "last"},
            r"method.representative: 'last' given; allowed: first, m",
        ),
        ({"clusters": [4, 4, 4], "probe_token": 3}, r"method.probe_token: .*did you mean probe_tokens"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it_and_what_is_allowed(settings: dict, line: str) -> None:
    with pytest.raises(SettingError, match=line) as error:
        build_method("chai", **settings).check(MODELS["llama"]())
    assert "\n" not in str(error.value)


def test_an_unknown_method_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingError, match="method: 'chia' given; allowed: .*mha.*chai"):
        build_method("chia")


def test_lists_and_run_lengths_mean_the_same() -> None:
    model = MODELS["llama"]()
    assert cluster_counts([[8, 1], [3, 2]], model) == cluster_counts([8, 3, 3], model) == (8, 3, 3)


@pytest.mark.parametrize("model", ["smollm2_mha", "smollm2"])
def test_every_shipped_preset_states_runs_that_fill_its_layers_and_heads(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path))  # without a calibration of the user's own
    shipped = [name for name in calibrated_presets() if name.startswith(f"{model}-")]
    assert sorted(shipped) == [f"{model}-{preset}" for preset in ("aggressive", "balanced", "conservative")]
    for name in shipped:
        runs = preset_runs(name)
        assert all(1 <= count <= 9 and layers >= 1 for count, layers in runs), name
        assert sum(layers for _, layers in runs) == 30, name
