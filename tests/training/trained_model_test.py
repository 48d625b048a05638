"""Tests of tff_dpftrl.training.trained_model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.training import toy_model
from tff_dpftrl.data import sequences, user_text, vocabulary
from tff_dpftrl.models import export, next_words, word_lstm
from tff_dpftrl.training import trained_model


def test_the_two_files_are_enough(tmp_path):
    trained = trained_model.find(toy_model.write(tmp_path / "run")).load()
    assert trained.words == toy_model.WORDS and trained.model == toy_model.MODEL
    for ours, theirs in zip(trained.weights, toy_model.weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_texts_are_read_as_in_training(tmp_path):
    texts = ["The front", "the FRONT isn't Foo 3.5 bar foo"]
    trained = trained_model.find(toy_model.write(tmp_path)).load()
    corpus = user_text.UserText.from_mapping("m", {"u": texts})
    spec = sequences.SequenceSpec(sequence_length=20)
    rows = sequences.SequenceCorpus(corpus, toy_model.WORDS, spec).sequences("u")
    for text, row, missing in zip(texts, rows, [(), ("foo", "bar")], strict=True):
        ids = [i for i in row[1:] if i not in (vocabulary.PAD, toy_model.WORDS.eos)]
        expected = next_words.next_words(
            trained.model,
            trained.weights,
            tf.ragged.constant([ids], dtype=tf.int32),
            trained.special,
            3,
        )
        (found,) = trained.predict([text], top=3)
        names = [toy_model.WORDS.words[i - 1] for i in expected.ids[0].numpy()]
        assert [word for word, _ in found.next_words] == names
        np.testing.assert_allclose([p for _, p in found.next_words], expected.probabilities[0])
        assert found.unknown_word == pytest.approx(float(expected.unknown_word[0]))
        assert found.end_of_text == pytest.approx(float(expected.end_of_text[0]))
        assert found.unknown_in_text == missing
    among_others = trained.predict(texts, top=3)[1].next_words  # Batches differ in the last bits.
    assert [word for word, _ in among_others] == [word for word, _ in found.next_words]
    np.testing.assert_allclose(
        [p for _, p in among_others], [p for _, p in found.next_words], rtol=1e-5
    )
    assert len(trained.predict(texts, top=2**31)[0].next_words) == len(toy_model.WORDS.words)


def test_texts_go_on_with_what_the_model_expects(tmp_path):
    trained = trained_model.find(toy_model.write(tmp_path)).load()
    texts = ["The front", "the"]
    (first, second) = trained.continue_texts(texts, 3, temperature=0.0)
    best = trained.predict(texts, top=1)
    for text, found, expected in zip(texts, (first, second), best, strict=True):
        ((word, probability),) = expected.next_words
        if probability > expected.end_of_text:
            assert found.text.split()[0] == word
            more = trained.predict([f"{text} {word}"], top=1)[0]
            assert found.has_ended or found.text.split()[1] == more.next_words[0][0]
        else:
            assert found == trained_model.Continuation("", True)
    assert trained.continue_texts(texts, 9, seed=1) == trained.continue_texts(texts, 9, seed=1)
    assert trained.continue_texts(texts, 9, seed=1) != trained.continue_texts(texts, 9, seed=2)
    long = " ".join(["the"] * 50)  # Longer than the model reads.
    assert len(trained.continue_texts([long], 5, seed=1)[0].text.split()) <= 5
    for options, message in (
        ({"num_tokens": 0}, "num_tokens must be at least 1"),
        ({"num_tokens": 1, "temperature": -1.0}, "temperature must be"),
        ({"num_tokens": 1, "top_p": 0.0}, "top_p must be"),
    ):
        with pytest.raises(ValueError, match=message):
            trained.continue_texts(texts, **options)
    with pytest.raises(ValueError, match="at least one word in it, got ' '"):
        trained.continue_texts([" "], 1)


def test_text_that_is_split_already_is_cut_at_spaces_only(tmp_path):
    trained = trained_model.find(toy_model.write(tmp_path, is_tokenized=True)).load()
    (found,) = trained.predict(["the front-end"])
    assert found.unknown_in_text == ("front-end",)


def test_the_last_and_the_best_model_are_told_apart(tmp_path):
    last, best = toy_model.weights(1), toy_model.weights(2)
    toy_model.write(tmp_path, last=last, best=best)
    for which, expected in (("last", last), ("best", best)):
        found = trained_model.find(tmp_path, which).load()
        np.testing.assert_array_equal(found.weights[0], expected[0])
    with pytest.raises(ValueError, match="which must be one of last, best; got 'first'"):
        trained_model.find(tmp_path, "first")


def test_a_checkpoint_has_no_best_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a checkpoint, which has one model .* leave --model"):
        trained_model.find(tmp_path, "best")


def test_nothing_to_go_on_is_refused(tmp_path):
    trained = trained_model.find(toy_model.write(tmp_path)).load()
    assert trained.predict([]) == []
    with pytest.raises(ValueError, match="at least one word in it, got ' '"):
        trained.predict(["the", " "])
    with pytest.raises(ValueError, match="top must be at least 1"):
        trained.predict(["the"], top=0)


def test_what_is_no_run_is_refused_with_what_to_do(tmp_path):
    run = tmp_path / "my run"
    with pytest.raises(ValueError, match="no trained model in .*my run: .*Name a folder"):
        trained_model.find(run)
    run.mkdir()
    (run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no model.npz yet: tff-dpftrl report '.*my run' writes"):
        trained_model.find(run)
    with pytest.raises(ValueError, match="no best_model.npz yet: no model has been evaluated"):
        trained_model.find(run, "best")
    toy_model.write(run)
    (run / "vocabulary.json").unlink()
    with pytest.raises(ValueError, match="has no words: .*train --resume --output '.*my run'"):
        trained_model.find(run)


def test_a_run_that_was_not_chosen_is_read_by_who_scores_it_alone(tmp_path):
    folder = toy_model.write(tmp_path / "private" / "cells" / "run=0")
    with pytest.raises(ValueError, match="nothing of them may leave the sweep"):
        trained_model.find(folder)
    assert trained_model.find(folder, is_published=False).words == toy_model.WORDS


def test_a_vocabulary_of_another_run_is_refused(tmp_path):
    toy_model.write(tmp_path)
    other = word_lstm.WordLstm(9, sequence_length=4, embedding_size=3, state_size=5)
    export.write(tmp_path / "model.npz", other, other.initial_weights(0))
    with pytest.raises(ValueError, match="a model of 9 ids, but vocabulary.json beside it has 11"):
        trained_model.find(tmp_path).load()


def test_a_folder_is_refused_before_tensorflow_is_imported(tmp_path):
    code = (
        "import sys\n"
        "from tff_dpftrl.cli import main\n"
        f"status = main.main(['predict', {str(tmp_path)!r}, 'the'])\n"
        "sys.exit(status if 'tensorflow' not in sys.modules else 77)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
