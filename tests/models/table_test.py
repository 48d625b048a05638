"""Tests of tff_dpftrl.models.table."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing

import pytest

from tff_dpftrl.models import table, word_lstm
from tff_dpftrl.training import config as config_lib


def test_a_config_can_name_every_model_and_no_other():
    assert set(typing.get_args(config_lib.Model)) == set(table.MODELS)


def test_a_model_is_built_of_its_sizes():
    assert table.build("word-lstm", vocabulary_size=9, state_size=5) == word_lstm.WordLstm(
        9, state_size=5
    )
    with pytest.raises(ValueError, match="model must be one of word-lstm; got 'gpt'"):
        table.build("gpt", vocabulary_size=9)
    with pytest.raises(ValueError, match="'word-lstm' cannot be built from .*'depth'"):
        table.build("word-lstm", vocabulary_size=9, depth=3)
    with pytest.raises(ValueError, match="state_size must be at least 1, got 0"):
        table.build("word-lstm", vocabulary_size=9, state_size=0)


def test_a_description_survives_json():
    model = word_lstm.WordLstm(9, state_size=5, couple_gates=True)
    description = json.loads(json.dumps(table.describe(model)))
    assert description["model"] == "word-lstm"
    assert table.from_description(description) == model


def test_what_is_not_in_the_table_is_not_described():
    @dataclasses.dataclass(frozen=True)
    class Other:
        width: int = 3

    with pytest.raises(ValueError, match="Other has no entry in MODELS"):
        table.describe(Other())
    with pytest.raises(ValueError, match="must have the key 'model'"):
        table.from_description({"vocabulary_size": 9})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
