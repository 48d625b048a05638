"""Personalisation: half of a user's text to train on, the other to predict."""

import math
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "experiments"))
import personalisation

from tff_dpftrl.data import sequences, tokenizer, user_text, vocabulary
from tff_dpftrl.models import metrics, transformer
from tff_dpftrl.training import trained_model

_WORDS = vocabulary.Vocabulary(tuple("abcdefghijkl"), "a test")
_MODEL = transformer.Transformer(
    _WORDS.size, 4, embedding_size=6, num_layers=1, num_heads=2, feed_forward_size=7
)
_RATE = 0.5


def _text(**examples):
    return user_text.UserText.from_mapping("toy", examples)


def _config(**options):
    return personalisation.Config(**{"learning_rate": _RATE} | options)


def _personalise(text, **options):
    rule = tokenizer.Tokenizer(True, False)
    trained = trained_model.TrainedModel(_MODEL, _MODEL.initial_weights(0), _WORDS, rule)
    return personalisation.personalise(trained, text, _config(**options))


def test_users_who_have_words_of_their_own_gain():
    # Each has two words that nobody else has, in both halves.
    text = _text(**{a: [f"{a} {b} {a}", f"{b} {a} {b}"] * 4 for a, b in ("ab", "cd", "ef", "gh")})
    found = _personalise(text)
    assert found.num_users == 4
    assert found.gain.value > 0.5 > 10 * found.gain.standard_error


def test_the_second_half_is_not_trained_on():
    # A model that had seen the second half would find its words likelier than before.
    text = _text(**{a: [f"{a} {a} {a}"] * 4 + [f"{b} {b} {b}"] * 4 for a, b in ("ab", "cd", "ef")})
    assert _personalise(text).gain.value < -0.1
    both = _text(**{a: [f"{a} {a} {a}", f"{b} {b} {b}"] * 4 for a, b in ("ab", "cd", "ef")})
    assert _personalise(both).gain.value > 0.1


def _expected_losses(text, *, epochs):
    """Loss of the second half after gradient descent on the first, before and after, by user."""
    encoded = sequences.SequenceCorpus(text, _WORDS, sequences.SequenceSpec(4))

    def loss(weights, rows):
        logits, positions = _MODEL.compact_logits(weights, rows[:, :-1])
        targets = tf.gather(tf.reshape(rows[:, 1:], [-1]), positions)
        return metrics.mean_cross_entropy(logits, targets, 0)

    found = []
    for user in text.user_ids:
        rows = encoded.sequences(user)
        own, others = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        weights = [tf.constant(weight) for weight in _MODEL.initial_weights(0)]
        before = float(loss(weights, others))
        for _ in range(epochs):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                value = loss(weights, own)
            gradients = map(tf.convert_to_tensor, tape.gradient(value, weights))
            weights = [w - _RATE * g for w, g in zip(weights, gradients, strict=True)]
        found.append((before, float(loss(weights, others))))
    return np.array(found).T


def test_means_and_standard_errors_are_those_of_users():
    # Nine examples and eleven: the middle one is predicted. Batches of a whole half.
    text = _text(
        a=["a b", "b a c", "c", "a a", "d b", "b", "a b c", "c c", "b a"],
        d=["d e", "e f", "f", "d d", "e", "f f f", "d e f", "e e", "f d", "d", "e d"],
        g=["g h"] * 3 + ["h g"] * 5,
    )
    before, after = _expected_losses(text, epochs=3)
    found = _personalise(text, epochs=3, batch_size=100)
    for mean, values in (
        (found.before, before),
        (found.after, after),
        (found.gain, before - after),
    ):
        assert mean.value == pytest.approx(values.mean(), rel=1e-4)
        assert mean.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(3), rel=1e-3)


def test_nobody_changes_what_others_get():
    texts = {"a": ["a b c"] * 9, "d": ["d e", "e d f"] * 5}
    both = _personalise(_text(**texts), batch_size=2)
    alone = [_personalise(_text(**{u: t}), batch_size=2) for u, t in texts.items()]
    assert both.after.value == pytest.approx(np.mean([one.after.value for one in alone]), rel=1e-6)
    assert math.isnan(alone[0].after.standard_error)


def test_a_training_that_diverges_is_no_result():
    with pytest.raises(ValueError, match="diverged"):
        _personalise(_text(a=["a b", "b a"] * 4), learning_rate=1e30)


def test_users_with_few_examples_are_left_out_and_others_chosen_for_good():
    # A text without a word is no example.
    sizes = {f"u{i}": 3 + i % 7 for i in range(40)}
    text = _text(**{user: ["a b", " "] * size for user, size in sizes.items()})
    config = _config(min_examples=6, max_users=9)
    encoded = sequences.SequenceCorpus(text, _WORDS, sequences.SequenceSpec(4))
    chosen = personalisation.choose(encoded, config)
    assert len(chosen) == 9 and all(sizes[user] >= 6 for user in chosen)
    # Whoever else there is, those first in the order stay.
    some = sequences.SequenceCorpus(text.select(chosen[:3]), _WORDS, sequences.SequenceSpec(4))
    assert personalisation.choose(some, config) == chosen[:3]
    with pytest.raises(ValueError, match="No user has min_examples = 10"):
        _personalise(text, min_examples=10)
