"""Tests of the options that pretraining, training and fine-tuning share."""

import pytest

from tff_dpftrl.training import language_config


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_heads": 2},
            "num_heads is for the model transformer or gpt2 or llama, not for word-lstm: leave it",
        ),
        (
            {"model": "transformer", "lstm_size": 9},
            "lstm_size is for the model word-lstm or gboard-cifg or dp-fedavg-lstm, not for tran",
        ),
        ({"model": "transformer", "num_layers": 0}, "num_layers must be"),
        ({"model": "gpt"}, "model must be one of word-lstm, gboard-"),
        ({"sequence_length": 2.5}, "sequence_length must be of type int, got 2.5"),
        ({"model": "own", "initial_weights": "here"}, "initial_weights has no meaning with a cu"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        language_config.LanguageConfig(**options)


def test_sizes_are_the_models_own_unless_given():
    made = language_config.LanguageConfig(model="gboard-cifg", embedding_size=32)
    assert made.model_sizes == {"embedding_size": 32}
    full = made.with_defaults()
    assert (full.embedding_size, full.lstm_size, full.tie_embeddings) == (32, 670, False)
    assert full.num_layers is None and full.with_defaults() == full
    tied = language_config.LanguageConfig(model="gboard-cifg", tie_embeddings=True)
    assert tied.with_defaults().tie_embeddings


def test_help_has_what_is_meant_if_nothing_is_given():
    fields = language_config.LanguageConfig.__dataclass_fields__
    meant = {
        name: fields[name].metadata["help"].split("if not given, ")[1]
        for name in ("embedding_size", "lstm_size", "tie_embeddings", "num_layers")
    }
    assert meant == {
        "embedding_size": "96.",
        "lstm_size": "128 (word-lstm), 670 (gboard-cifg), 256 (dp-fedavg-lstm).",
        "tie_embeddings": "yes (word-lstm), no (gboard-cifg), yes (dp-fedavg-lstm), yes (llama).",
        "num_layers": "2 (transformer), 2 (gpt2), 2 (llama).",
    }


def test_paths_become_absolute_where_options_name_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = language_config.LanguageConfig(initial_weights="a/b").with_absolute_paths()
    assert named.initial_weights == str(tmp_path / "a" / "b")
    assert named.data == "docs" and named.vocabulary is None


def test_a_vocabulary_that_is_not_named_follows_from_weights_and_data():
    def named(**options):
        full = language_config.LanguageConfig(**options).with_defaults()
        assert full.with_defaults() == full
        return full.vocabulary, full.vocabulary_size

    assert named() == ("docs", 4000)
    assert named(data="reviews.csv", vocabulary_size=30) == ("english", 30)
    assert named(data="reviews.csv", vocabulary="docs") == ("docs", 4000)
    # All the words of the weights, in either case.
    for data in ("docs", "reviews.csv"):
        assert named(data=data, initial_weights="a/b") == ("a/b/vocabulary.json", None)
    assert named(data="reviews.csv", initial_weights="a/b", vocabulary="english")[0] == "english"
