"""Tests of tff_dpftrl.models.language_model, with the smallest model there is."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import evaluation, language_model, metrics, word_lstm

_WORDS = np.array([[4, 1, 2, 0], [4, 3, 0, 0]], np.int32)


@dataclasses.dataclass(frozen=True)
class _Bigrams(language_model.LanguageModel):
    """One row of scores for each last word."""

    vocabulary_size: int
    sequence_length: int

    @property
    def weight_shapes(self):
        return {"scores": (self.vocabulary_size, self.vocabulary_size)}

    def initial_weights(self, seed):
        rng = np.random.default_rng(seed)
        return (rng.standard_normal(self.weight_shapes["scores"]).astype(np.float32),)

    def logits(self, weights, words):
        return tf.gather(weights[0], words)


def test_padding_is_left_out_of_any_models_scores():
    model = _Bigrams(vocabulary_size=6, sequence_length=4)
    weights = model.initial_weights(0)
    scores, positions = model.compact_logits(weights, _WORDS)
    assert positions.numpy().tolist() == [0, 1, 2, 4, 5]
    np.testing.assert_array_equal(scores, weights[0][[4, 1, 2, 4, 3]])
    assert model.num_parameters == 36


def test_a_model_that_saves_work_scores_the_same():
    model = word_lstm.WordLstm(6, sequence_length=4, embedding_size=3, state_size=5)
    weights = model.initial_weights(0)
    found = model.compact_logits(weights, _WORDS)
    expected = language_model.LanguageModel.compact_logits(model, weights, _WORDS)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])


def test_evaluation_and_training_need_no_more_than_the_interface():
    model, special = _Bigrams(6, 4), metrics.SpecialIds(oov=3, bos=4, eos=5)
    rows = np.array([[4, 1, 2, 5, 0]], np.int32)
    scores = np.zeros([6, 6], np.float32)
    scores[[4, 1, 2], [1, 2, 5]] = 9.0
    found = evaluation.Evaluator(model, special, rows)([scores])
    assert found["top1_in_vocab"] == 1.0 and found["num_targets"] == 3
    federated = functional_model.build(model, special, seed=7)
    np.testing.assert_array_equal(federated.initial_weights[0][0], model.initial_weights(7)[0])
    output = federated.predict_on_batch(federated.initial_weights, rows[:, :-1], training=False)
    assert np.isfinite(federated.loss(output, rows[:, 1:]))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
