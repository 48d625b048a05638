"""Tests of tff_dpftrl.models.language_model, with the smallest model and with ours."""

import numpy as np
import pytest
import tensorflow as tf

from tests.models import keras_peer, small_models
from tff_dpftrl.models import evaluation, language_model, metrics, table

_WORDS = np.array([[4, 1, 2, 0], [4, 3, 0, 0]], np.int32)


def test_padding_is_left_out_of_any_models_scores():
    model = small_models.Bigrams(vocabulary_size=6, sequence_length=4)
    weights = model.initial_weights(0)
    scores, positions = model.compact_logits(weights, _WORDS)
    assert positions.numpy().tolist() == [0, 1, 2, 4, 5]
    np.testing.assert_array_equal(scores, weights[0][[4, 1, 2, 4, 3]])
    assert model.num_parameters == 36


# Words, and padding after them; none of all in the last.
_ROWS = np.array([[9, 1, 2, 3, 8], [9, 4, 10, 0, 0], [0, 0, 0, 0, 0]], np.int32)


@pytest.fixture(name="model", params=list(table.MODELS))
def _model(request):
    return small_models.build(request.param, vocabulary_size=11, sequence_length=5)


def test_a_model_that_saves_work_scores_the_same(model):
    weights = keras_peer.noisy_weights(model, np.float32)
    found = model.compact_logits(weights, _ROWS)
    expected = language_model.LanguageModel.compact_logits(model, weights, _ROWS)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    assert found[0].dtype == tf.float32 and found[0].shape == [8, 11]


def test_later_words_and_padding_do_not_matter(model):
    weights = keras_peer.noisy_weights(model)
    logits = model.logits(weights, _ROWS)
    for later in (6, language_model.PAD):
        changed = _ROWS.copy()
        changed[:, 3:] = later
        others = model.logits(weights, changed)
        np.testing.assert_array_equal(logits[:, :3], others[:, :3])
        # The score of padding may be the same everywhere.
        assert np.abs(logits[0, 3:, 1:] - others[0, 3:, 1:]).min() > 1e-3


def test_rows_of_a_batch_do_not_matter_to_each_other(model):
    weights = keras_peer.noisy_weights(model)
    alone = [model.logits(weights, _ROWS[i : i + 1]) for i in range(len(_ROWS))]
    np.testing.assert_allclose(
        model.logits(weights, _ROWS), tf.concat(alone, 0), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("words", [np.zeros([3, 5], np.int32), np.zeros([0, 5], np.int32)])
def test_nothing_to_score_has_no_gradient(model, words):
    weights = keras_peer.noisy_weights(model)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scores, positions = model.compact_logits(weights, words)
    assert scores.shape == [0, 11] and positions.shape == [0]
    for weight, gradient in zip(weights, tape.gradient(scores, weights), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(weight))


@pytest.mark.slow
def test_gradients_of_examples_can_be_vectorised(model):
    weights = keras_peer.noisy_weights(model)

    def gradients(words):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            total = tf.reduce_sum(tf.sin(model.logits(weights, words[tf.newaxis])))
        return [tf.convert_to_tensor(g) for g in tape.gradient(total, weights)]

    found = tf.vectorized_map(gradients, tf.constant(_ROWS), fallback_to_while_loop=False)
    for index, words in enumerate(_ROWS):
        for x, y in zip(found, gradients(tf.constant(words)), strict=True):
            np.testing.assert_allclose(x[index], y, rtol=1e-10, atol=1e-10)


def test_initial_weights_have_the_stated_shapes_and_depend_on_the_seed(model):
    first, again, other = (model.initial_weights(seed) for seed in (1, 1, 2))
    assert [weight.shape for weight in first] == list(model.weight_shapes.values())
    assert all(weight.dtype == np.float32 for weight in first)
    assert sum(weight.size for weight in first) == model.num_parameters
    for x, y, z in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.ndim == 1 or (x != z).any()


def test_another_sequence_length_is_refused(model):
    with pytest.raises(ValueError, match=r"must have shape \[batch, 5\], got \(3, 4\)"):
        model.logits(model.initial_weights(0), _ROWS[:, :4])


def test_evaluation_needs_no_more_than_the_interface():
    model, special = small_models.Bigrams(6, 4), metrics.SpecialIds(oov=3, bos=4, eos=5)
    rows = np.array([[4, 1, 2, 5, 0]], np.int32)
    scores = np.zeros([6, 6], np.float32)
    scores[[4, 1, 2], [1, 2, 5]] = 9.0
    found = evaluation.Evaluator(model, special, rows)([scores])
    assert found["top1_in_vocab"] == 1.0 and found["num_targets"] == 3
