"""Tests of tff_dpftrl.models.table."""

import dataclasses
import json

import pytest

from tests.models import small_models
from tff_dpftrl.models import table, word_lstm
from tff_dpftrl.training import config as config_lib


@pytest.mark.parametrize("name", table.MODELS)
def test_a_config_can_change_every_size_and_no_other(name):
    config = config_lib.TrainingConfig.of(model=name, mechanism="none")
    assert config.language.model_sizes == {}
    assert config.with_defaults().model_sizes == table.MODELS[name].sizes


def test_a_model_is_built_of_its_sizes():
    assert table.build("word-lstm", vocabulary_size=9, state_size=5) == word_lstm.WordLstm(
        9, state_size=5
    )
    with pytest.raises(ValueError, match="model must be one of word-lstm, .*; got 'gpt'"):
        table.build("gpt", vocabulary_size=9)
    with pytest.raises(ValueError, match="'word-lstm' cannot be built from .*'depth'"):
        table.build("word-lstm", vocabulary_size=9, depth=3)
    with pytest.raises(ValueError, match="state_size must be at least 1, got 0"):
        table.build("word-lstm", vocabulary_size=9, state_size=0)


@pytest.mark.parametrize(
    "words, sizes, millions",
    [
        # Xu et al. 2023, section 1: 2.4M, 4.4M and 6.4M with about so many words.
        (10_000, {}, 2.4),
        (20_000, {}, 4.4),
        (30_000, {}, 6.4),
        # Bonawitz et al. 2019 on Gboard: about 1.4 million.
        (10_000, {"tie_embeddings": True}, 1.4),
    ],
)
def test_gboards_model_has_the_parameters_of_the_papers(words, sizes, millions):
    model = table.build("gboard-cifg", vocabulary_size=words, **sizes)
    embeddings = 1 if model.tie_embeddings else 2
    cell = 3 * 670 * (96 + 96 + 1) + 670 * 96
    assert model.num_parameters == embeddings * words * 96 + cell + words
    assert model.num_parameters / 1e6 == pytest.approx(millions, rel=0.03)


def test_dp_fedavgs_model_has_the_parameters_of_the_paper():
    # McMahan et al. 2018, appendix B: "1.35M trainable parameters", without an output bias.
    model = table.build("dp-fedavg-lstm", vocabulary_size=10_000)
    without_output_bias = model.num_parameters - model.vocabulary_size
    assert without_output_bias == 10_000 * 96 + (96 + 256 + 1) * 4 * 256 + 256 * 96
    assert round(without_output_bias / 1e6, 2) == 1.35
    assert model.unit_norm_embeddings


@pytest.mark.parametrize("name", table.MODELS)
def test_a_description_survives_json(name):
    model = small_models.build(name, vocabulary_size=9)
    description = json.loads(json.dumps(table.describe(model)))
    assert table.from_description(description) == model
    assert set(description) == {"model", *(field.name for field in dataclasses.fields(model))}


def test_a_description_of_an_earlier_version_can_be_read():
    # What version 0.3 wrote, before there was a recurrent projection.
    description = {
        "model": "word-lstm",
        "vocabulary_size": 34,
        "sequence_length": 6,
        "embedding_size": 4,
        "state_size": 5,
        "tie_embeddings": False,
        "couple_gates": True,
        "unit_norm_embeddings": False,
    }
    assert table.from_description(description) == word_lstm.WordLstm(
        34, 6, 4, 5, tie_embeddings=False, couple_gates=True
    )


def test_what_is_not_in_the_table_is_not_described():
    @dataclasses.dataclass(frozen=True)
    class Other:
        width: int = 3

    with pytest.raises(ValueError, match="Other has no entry in MODELS"):
        table.describe(Other())
    with pytest.raises(ValueError, match="must have the key 'model'"):
        table.from_description({"vocabulary_size": 9})
