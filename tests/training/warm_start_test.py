"""Tests of tff_dpftrl.training.warm_start."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from tests.training import toy_model
from tff_dpftrl.data import vocabulary
from tff_dpftrl.training import warm_start

_WORDS = vocabulary.Vocabulary(("end", "new", "the"), "another book")


def _read(folder, words=_WORDS, **sizes):
    model = dataclasses.replace(toy_model.MODEL, vocabulary_size=words.size, **sizes)
    return model, warm_start.read(folder, model, words, seed=3, protected="users")


def test_the_same_words_give_the_same_weights(tmp_path):
    _, found = _read(toy_model.write(tmp_path), toy_model.WORDS)
    assert found.num_known_words == len(toy_model.WORDS.words)
    for ours, theirs in zip(found.weights, toy_model.weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_other_words_are_mapped_by_word(tmp_path, monkeypatch, tie_embeddings):
    monkeypatch.setattr(
        toy_model, "MODEL", dataclasses.replace(toy_model.MODEL, tie_embeddings=tie_embeddings)
    )
    model, found = _read(toy_model.write(tmp_path))
    assert found.num_known_words == 2
    old = dict(zip(toy_model.MODEL.weight_shapes, toy_model.weights(), strict=True))
    new = dict(zip(model.weight_shapes, found.weights, strict=True))
    fresh = dict(zip(model.weight_shapes, model.initial_weights(3), strict=True))
    # Ids: padding 0; words from 1; then out of vocabulary, beginning, end.
    same = {0: 0, 1: 3, 3: 1, 4: 8, 5: 9, 6: 10}
    by_word = {name for name, shape in model.weight_shapes.items() if _WORDS.size in shape}
    untied = set() if tie_embeddings else {"output_embedding"}
    assert by_word == {"embedding", "output_bias"} | untied
    for name in model.weight_shapes:
        if name not in by_word:
            np.testing.assert_array_equal(new[name], old[name])
            continue
        for here, there in same.items():
            np.testing.assert_array_equal(new[name][here], old[name][there])
        np.testing.assert_array_equal(new[name][2], fresh[name][2])


def test_new_words_of_users_begin_as_the_unknown_word(tmp_path):
    words = vocabulary.Vocabulary(
        ("end", "new", "the", "newer"), "users", is_public=False, is_noised=True
    )
    model, found = _read(toy_model.write(tmp_path), words)
    ids = np.array([[1, 3, 2, 4]])
    scores = model.logits(found.weights, tf.constant(ids, tf.int32)).numpy()[0]
    old_ids = np.array([[3, 1, toy_model.WORDS.oov, toy_model.WORDS.oov]])
    old = toy_model.MODEL.logits(toy_model.weights(), tf.constant(old_ids, tf.int32)).numpy()[0]
    unknown = np.exp(old[:, toy_model.WORDS.oov])
    # Both together are as likely as the unknown word is, which the model reads them as.
    for new in (2, 4):
        np.testing.assert_allclose(np.exp(scores[:, new]), unknown / 2, rtol=1e-4)
    np.testing.assert_allclose(np.exp(scores[:, words.oov]), unknown, rtol=1e-4)
    np.testing.assert_allclose(scores[:, 1], old[:, 3], rtol=1e-4)


def test_another_sequence_length_needs_no_other_weights(tmp_path):
    _, found = _read(toy_model.write(tmp_path), toy_model.WORDS, sequence_length=9)
    np.testing.assert_array_equal(found.weights[0], toy_model.weights()[0])


def test_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="are of another model.*state_size=5.*state_size=6"):
        _read(toy_model.write(tmp_path), state_size=6)


def test_a_folder_without_a_model_is_refused_by_the_name_of_the_option(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="initial_weights cannot be read. There is no trained mod"):
        warm_start.find(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    toy_model.write(tmp_path / "before")
    assert warm_start.find("~/before").model_path == tmp_path / "before" / "model.npz"


def test_the_source_is_what_the_folder_says(tmp_path):
    folder = toy_model.write(tmp_path / "before")
    unknown = "the model 'before', of which is not recorded what it was trained on"
    assert warm_start.source(folder) == (unknown, False)
    record = folder / warm_start.RECORD
    record.write_text(json.dumps({"source": "a book"}))
    assert warm_start.source(folder) == ("the model 'before', trained on a book", True)
    record.write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        warm_start.source(folder)


def test_a_run_in_a_folder_of_pretraining_is_not_called_public(tmp_path):
    folder = toy_model.write(tmp_path / "before")
    (folder / warm_start.RECORD).write_text(json.dumps({"source": "a book"}))
    (folder / "config.json").write_text("{}")
    found, is_public = warm_start.source(folder)
    assert "the training run 'before', whose own statement" in found and not is_public
