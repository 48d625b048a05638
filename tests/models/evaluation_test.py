"""Tests of tff_dpftrl.models.evaluation."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import evaluation, metrics, word_lstm

_MODEL = word_lstm.WordLstm(10, sequence_length=4, embedding_size=3, state_size=5)
_SPECIAL = metrics.SpecialIds(oov=7, bos=8, eos=9)


def _sequences(count):
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 8, [count, 5])
    rows[:, 0] = 8
    for row in rows:
        row[rng.integers(2, 6) :] = 0
    return rows


def test_agrees_with_one_pass_over_full_logits():
    rows, weights = _sequences(23), _MODEL.initial_weights(1)
    logits = tf.reshape(_MODEL.logits(weights, rows[:, :-1]), [-1, 10])
    expected = metrics.finalize(metrics.count(logits, rows[:, 1:].reshape(-1), _SPECIAL))
    for batch_size in (1, 5, 64):
        found = evaluation.Evaluator(_MODEL, _SPECIAL, rows, batch_size=batch_size)(weights)
        assert list(found) == list(expected)
        assert all(isinstance(value, float) for value in found.values())
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), rel=1e-5), name


def test_a_guess_among_equals_costs_the_logarithm_for_each_target():
    weights = [np.zeros_like(weight) for weight in _MODEL.initial_weights(1)]
    evaluate = evaluation.Evaluator(_MODEL, _SPECIAL, _sequences(9), targets_per_character=0.25)
    assert evaluate(weights)["bits_per_character"] == pytest.approx(np.log2(10) / 4, rel=1e-5)


def test_new_weights_are_evaluated_anew():
    evaluate = evaluation.Evaluator(_MODEL, _SPECIAL, _sequences(9))
    first, second = _MODEL.initial_weights(1), _MODEL.initial_weights(2)
    losses = [evaluate(weights)["loss"] for weights in (first, second, first)]
    assert losses[0] == losses[2] != losses[1]
    tensors = [tf.Variable(weight) for weight in first]
    assert evaluate(tensors)["loss"] == losses[0]


def test_metrics_are_the_same_bits_on_any_number_of_cores(monkeypatch):
    found = []
    for cores in (1, 64):
        monkeypatch.setattr(evaluation.os, "sched_getaffinity", lambda _, n=cores: range(n))
        evaluate = evaluation.Evaluator(_MODEL, _SPECIAL, _sequences(50), batch_size=3)
        found.append(evaluate(_MODEL.initial_weights(1)))
    assert found[0] == found[1]


def test_bad_sequences_and_weights_are_refused():
    with pytest.raises(ValueError, match=r"must have shape \[n, 5\], got \[3, 4\]"):
        evaluation.Evaluator(_MODEL, _SPECIAL, _sequences(3)[:, :4])
    with pytest.raises(ValueError, match="must not be empty"):
        evaluation.Evaluator(_MODEL, _SPECIAL, _sequences(0))
    evaluate = evaluation.Evaluator(_MODEL, _SPECIAL, _sequences(3))
    with pytest.raises(ValueError, match="shorter"):
        evaluate(_MODEL.initial_weights(0)[:-1])
