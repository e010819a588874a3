"""What may be asked of a measurement, and how a mistake is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from chai_eval.errors import SettingError
from chai_eval.measure_settings import MeasureSettings, Point, check_positions, parse_measure


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lengths": [0]}, "measure.lengths: 0 given"),
        ({"lengths": [512, -1]}, "measure.lengths: -1 given"),
        ({"lengths": []}, "measure.lengths: [] given"),
        ({"lengths": "long"}, "measure.lengths: 'long' given"),
        ({"lengths": [1.5]}, "measure.lengths: 1.5 given"),
        ({"lengths": [True]}, "measure.lengths: True given"),
        ({"batch_sizes": [0]}, "measure.batch_sizes: 0 given"),
        ({"new_tokens": [0]}, "measure.new_tokens: 0 given"),
        ({"new_tokens": -3}, "measure.new_tokens: -3 given"),
        ({"repetitions": 0}, "measure.repetitions: 0 given"),
        ({"warmup": -1}, "measure.warmup: -1 given"),
        ({"warmup": None}, "measure.warmup: None given"),
        ({"rivals": ["sdpa", "vllm"]}, "measure.rivals: ['sdpa', 'vllm'] given"),
        ({"rivals": 3}, "measure.rivals: 3 given"),
        ({"name": "speed"}, "measure.name: 'speed' given"),
        ({"length": [3]}, "measure.length: unknown"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_setting(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError) as error:
        parse_measure({"name": "full", **given})
    line = str(error.value)
    assert line.startswith(named)
    assert "allowed: " in line
    assert "\n" not in line


def test_settings_of_a_measurement_that_is_off_are_refused() -> None:
    assert parse_measure({"name": "off"}) is None
    with pytest.raises(SettingError, match=r"measure\.lengths: given with measure=off; allowed: measure=latency"):
        parse_measure({"name": "off", "lengths": [5]})


def test_one_number_stands_for_a_list_and_no_point_is_measured_twice() -> None:
    settings = MeasureSettings(lengths=(8, 8, 4), batch_sizes=2, new_tokens=[3])  # type: ignore[arg-type]
    assert settings.points == [Point(8, 2, 3), Point(4, 2, 3)]


def of_positions(positions: int | None) -> Any:
    """What stands in for a model that reads so many tokens."""
    config = PretrainedConfig() if positions is None else LlamaConfig(max_position_embeddings=positions)
    return SimpleNamespace(config=config)


def test_a_text_longer_than_the_model_reads_is_refused_and_the_longest_that_fits_is_not() -> None:
    settings = MeasureSettings(lengths=(96,), new_tokens=(32,))
    check_positions(settings, of_positions(128))
    check_positions(settings, of_positions(None))
    with pytest.raises(SettingError, match=r"measure\.lengths: 96 given, with 32 new tokens .* allowed: 1 to 95"):
        check_positions(settings, of_positions(127))
    with pytest.raises(SettingError, match=r"fewer measure\.new_tokens than 32"):
        check_positions(settings, of_positions(32))
