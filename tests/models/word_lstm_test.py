"""Tests of tff_dpftrl.models.word_lstm, against a loop in NumPy."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import word_lstm

_SMALL = word_lstm.WordLstm(vocabulary_size=11, sequence_length=5, embedding_size=3, state_size=4)
_VARIANTS = [
    dataclasses.replace(_SMALL, tie_embeddings=tie, couple_gates=couple, unit_norm_embeddings=unit)
    for tie, couple, unit in itertools.product([True, False], repeat=3)
]
_WORDS = np.array([[9, 1, 2, 3, 8], [9, 4, 10, 0, 0], [9, 7, 0, 0, 0]], np.int32)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _numpy_logits(model, weights, words):
    """One word of one sequence at a time, in float64."""
    named = {name: np.float64(w) for name, w in zip(model.weight_shapes, weights, strict=True)}
    if model.unit_norm_embeddings:
        for name in ("embedding", "output_embedding"):
            if name in named:
                named[name] /= np.linalg.norm(named[name], axis=1, keepdims=True)
    scores = named["embedding"] if model.tie_embeddings else named["output_embedding"]
    logits = np.zeros([*words.shape, model.vocabulary_size])
    for row, sequence in enumerate(words):
        hidden = cell = np.zeros(model.state_size)
        for t, word in enumerate(sequence):
            gates = named["embedding"][word] @ named["input_kernel"] + named["gate_bias"]
            gates = np.split(gates + hidden @ named["recurrent_kernel"], len(gates) // len(cell))
            enter, leave, new = gates[-3:]
            keep = 1 - _sigmoid(enter) if model.couple_gates else _sigmoid(gates[0])
            cell = keep * cell + _sigmoid(enter) * np.tanh(new)
            hidden = _sigmoid(leave) * np.tanh(cell)
            logits[row, t] = scores @ (hidden @ named["projection"]) + named["output_bias"]
    return logits


def _noisy_weights(model):
    rng = np.random.default_rng(0)
    return [w + rng.normal(0, 0.5, w.shape).astype(np.float32) for w in model.initial_weights(0)]


@pytest.mark.parametrize("model", _VARIANTS)
def test_agrees_with_numpy(model):
    weights = _noisy_weights(model)
    expected = _numpy_logits(model, weights, _WORDS)
    np.testing.assert_allclose(model.logits(weights, _WORDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", _VARIANTS[:2])
def test_compact_logits_are_those_without_padding(model):
    weights = _noisy_weights(model)
    compact, positions = model.compact_logits(weights, _WORDS)
    assert positions.numpy().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    full = tf.reshape(model.logits(weights, _WORDS), [-1, model.vocabulary_size])
    np.testing.assert_allclose(compact, tf.gather(full, positions), rtol=1e-5, atol=1e-6)


def test_later_words_do_not_matter():
    weights = _noisy_weights(_SMALL)
    changed = _WORDS.copy()
    changed[:, 3:] = 6
    logits, other = (_SMALL.logits(weights, words).numpy() for words in (_WORDS, changed))
    np.testing.assert_array_equal(logits[:, :3], other[:, :3])
    assert np.abs(logits[:, 3:] - other[:, 3:]).max() > 1e-3


@pytest.mark.parametrize("model", _VARIANTS)
def test_gradients_reach_every_weight_and_are_right(model):
    weights = [tf.constant(w, tf.float64) for w in _noisy_weights(model)]

    def total(weights):
        return tf.reduce_sum(tf.sin(model.compact_logits(weights, _WORDS)[0]))

    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = total(weights)
    gradients = tape.gradient(loss, weights)
    rng = np.random.default_rng(1)
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        direction = rng.normal(size=weight.shape)
        direction /= np.linalg.norm(direction)
        step = 1e-5
        ends = []
        for sign in (1, -1):
            moved = list(weights)
            moved[index] = weight + sign * step * direction
            ends.append(float(total(moved)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(tf.reduce_sum(gradient * direction)), abs=1e-7)
        assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("words", [np.zeros([3, 5], np.int32), np.zeros([0, 5], np.int32)])
def test_nothing_to_score_has_no_gradient(words):
    weights = [tf.constant(w) for w in _noisy_weights(_SMALL)]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scores, positions = _SMALL.compact_logits(weights, words)
    assert scores.shape == [0, 11] and positions.shape == [0]
    for weight, gradient in zip(weights, tape.gradient(scores, weights), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(weight))


def test_the_papers_sizes():
    # McMahan et al. 2018, appendix B: "1.35M trainable parameters" with 10,000 words.
    model = word_lstm.PAPER
    without_output_bias = model.num_parameters - model.vocabulary_size
    assert without_output_bias == 10_000 * 96 + (96 + 256 + 1) * 4 * 256 + 256 * 96
    assert round(without_output_bias / 1e6, 2) == 1.35
    assert (model.embedding_size, model.state_size, model.tie_embeddings) == (96, 256, True)


def test_coupled_gates_save_a_quarter():
    coupled = dataclasses.replace(_SMALL, couple_gates=True)
    for name in ("input_kernel", "recurrent_kernel", "gate_bias"):
        assert coupled.weight_shapes[name][-1] * 4 == _SMALL.weight_shapes[name][-1] * 3


@pytest.mark.parametrize("model", _VARIANTS)
def test_initial_weights_have_the_stated_shapes(model):
    weights = model.initial_weights(3)
    assert [w.shape for w in weights] == list(model.weight_shapes.values())
    assert all(w.dtype == np.float32 for w in weights)
    assert sum(w.size for w in weights) == model.num_parameters


def test_initial_weights_depend_on_the_seed_alone():
    first, again, other = (_SMALL.initial_weights(seed) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()
    # Golden value: Philox is the same on every platform and in every NumPy since 1.17.
    assert word_lstm.WordLstm(3, embedding_size=4).initial_weights(0)[0][0, 0] == pytest.approx(
        np.random.Generator(np.random.Philox(0)).standard_normal() / 2, rel=1e-6
    )


def test_initial_weights_have_the_stated_scales():
    model = word_lstm.WordLstm(2000, embedding_size=50, state_size=80)
    named = dict(zip(model.weight_shapes, model.initial_weights(0), strict=True))
    for name, inputs in (
        *(("embedding", 50), ("input_kernel", 50)),
        *(("recurrent_kernel", 80), ("projection", 80)),
    ):
        weight = named[name]
        # The standard error of a standard deviation of n Gaussians is 1/√(2n) of it.
        margin = 6 / np.sqrt(2 * weight.size)
        assert weight.std() * np.sqrt(inputs) == pytest.approx(1, abs=margin)
    assert named["gate_bias"][:80].tolist() == [1] * 80
    assert not named["gate_bias"][80:].any() and not named["output_bias"].any()


@pytest.mark.parametrize(
    "field", ["vocabulary_size", "sequence_length", "embedding_size", "state_size"]
)
def test_bad_sizes_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        dataclasses.replace(_SMALL, **{field: 0})


def test_another_sequence_length_is_refused():
    with pytest.raises(ValueError, match=r"must have shape \[batch, 5\], got \(3, 4\)"):
        _SMALL.logits(_SMALL.initial_weights(0), _WORDS[:, :4])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
