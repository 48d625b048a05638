"""Tests of personalisation: half of a user's text to train on, the other to predict."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.training import toy_run
from tff_dpftrl.data import sequences, split, tokenizer, user_text, vocabulary
from tff_dpftrl.finetuning import personalisation
from tff_dpftrl.models import metrics, transformer
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import trained_model

_WORDS = vocabulary.Vocabulary(tuple("abcdefghijkl"), "a test")
_MODEL = transformer.Transformer(
    _WORDS.size, 4, embedding_size=6, num_layers=1, num_heads=2, feed_forward_size=7
)
_RATE = 0.5


def _trained(seed=0):
    rule = tokenizer.Tokenizer(True, False)
    return trained_model.TrainedModel(_MODEL, _MODEL.initial_weights(seed), _WORDS, rule)


def _text(**examples):
    return user_text.UserText.from_mapping("toy", examples)


def _config(**options):
    return personalisation.PersonalisationConfig(**{"learning_rates": (_RATE,)} | options)


def _personalise(text, **options):
    return personalisation.personalise(_trained(), text, _config(**options))


def test_users_who_have_words_of_their_own_gain():
    # Each has two words that nobody else has, in both halves.
    text = _text(**{a: [f"{a} {b} {a}", f"{b} {a} {b}"] * 4 for a, b in ("ab", "cd", "ef", "gh")})
    found = _personalise(text)
    (after,) = found.after
    assert found.num_users == 4 and found.best is after
    assert after.loss_gain.value > 0.5 > 10 * after.loss_gain.standard_error
    assert after.loss.value < found.before.loss.value - 0.5
    assert after.top1_gain.value > 0.2


def test_the_second_half_is_not_trained_on():
    # A model that had seen the second half would find its words likelier than before.
    text = _text(**{a: [f"{a} {a} {a}"] * 4 + [f"{b} {b} {b}"] * 4 for a, b in ("ab", "cd", "ef")})
    found = _personalise(text)
    assert found.after[0].loss_gain.value < -0.1
    both = _text(**{a: [f"{a} {a} {a}", f"{b} {b} {b}"] * 4 for a, b in ("ab", "cd", "ef")})
    assert _personalise(both).after[0].loss_gain.value > 0.1


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
    (outcome,) = found.after
    for mean, values in (
        (found.before.loss, before),
        (outcome.loss, after),
        (outcome.loss_gain, before - after),
    ):
        assert mean.value == pytest.approx(values.mean(), rel=1e-4)
        assert mean.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(3), rel=1e-3)


def test_nobody_changes_what_others_get():
    texts = {"a": ["a b c"] * 9, "d": ["d e", "e d f"] * 5}
    both = _personalise(_text(**texts), batch_size=2).after[0]
    alone = [_personalise(_text(**{u: t}), batch_size=2).after[0] for u, t in texts.items()]
    assert both.loss.value == pytest.approx(np.mean([one.loss.value for one in alone]), rel=1e-6)
    assert math.isnan(alone[0].loss.standard_error)


def test_rates_are_compared_on_the_same_terms_and_the_best_is_found():
    text = _text(**{a: [f"{a} {b}", f"{b} {a}"] * 4 for a, b in ("ab", "cd")})
    found = _personalise(text, learning_rates=(0.001, 0.5, 1e30))
    alone = _personalise(text)
    assert found.after[1] == alone.after[0] == found.best
    assert found.after[0].loss_gain.value > 0
    assert found.after[2].loss.value == math.inf
    numbers = found.after[2].as_dict()
    assert numbers["loss"] is None and numbers["learning_rate"] == 1e30
    json.dumps([numbers, found.before.as_dict()], allow_nan=False)
    with pytest.raises(ValueError, match="diverged with each of learning_rates .* lower them"):
        _personalise(text, learning_rates=(1e30,))


def test_users_with_few_examples_are_left_out_and_others_chosen_for_good():
    # A text without a word is no example.
    sizes = {f"u{i}": 3 + i % 7 for i in range(40)}
    text = _text(**{user: ["a b", " "] * size for user, size in sizes.items()})
    config = _config(min_examples=6, max_users=9)
    encoded = sequences.SequenceCorpus(text, _WORDS, sequences.SequenceSpec(4))
    chosen, num_too_few = personalisation._choose(encoded, config)
    assert len(chosen) == 9 and all(sizes[user] >= 6 for user in chosen)
    assert 0 < num_too_few <= sum(size < 6 for size in sizes.values())
    assert personalisation._choose(encoded, config) == (chosen, num_too_few)
    other, _ = personalisation._choose(encoded, _config(min_examples=6, max_users=9, seed=1))
    assert set(other) != set(chosen)
    # Whoever else there is, those first in the order stay.
    some = sequences.SequenceCorpus(text.select(chosen[:3]), _WORDS, sequences.SequenceSpec(4))
    assert personalisation._choose(some, config) == (chosen[:3], 0)
    with pytest.raises(ValueError, match="has 40 such users, none of whom has min_examples = 10"):
        _personalise(text, min_examples=10)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"learning_rates": (0.1, 0.0)},
            "learning_rates must be a finite number, at least 1e-37 .*, got 0",
        ),
        ({"learning_rates": ()}, "learning_rates must be one or more different ones"),
        ({"learning_rates": (0.1, 0.1)}, "learning_rates must be one or more different ones"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"min_examples": 1}, "min_examples must be at least 2, got 1"),
        ({"max_users": 0}, "max_users must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _config(**options)


def test_the_users_are_those_who_did_not_train(tmp_path):
    toy_run.write_corpus(tmp_path)
    data = {"data": str(tmp_path / "users.jsonl")}
    for part, bucket in (("held-out", 1), ("test", 0)):
        text = personalisation.read(tmp_path, data, part)
        assert len(text) and {split.hash_bucket(user) for user in text.user_ids} == {bucket}
    with pytest.raises(ValueError, match="users must be one of held-out, test; got 'train'"):
        personalisation.read(tmp_path, data, "train")


def test_the_text_is_that_of_the_run_unless_other_text_is_named(tmp_path):
    toy_run.write_corpus(tmp_path)
    with pytest.raises(ValueError, match="not the folder of a run, .* name text with data"):
        personalisation.read(tmp_path, {}, "held-out")
    data = str(tmp_path / "users.jsonl")
    config = {"data": data, "pretokenized": True, "max_users": 7, "num_rounds": 3}
    run = tmp_path / "run"
    (run / "private").mkdir(parents=True)
    manifest.Manifest(config, {}, {}, {}).keep(run)
    own = personalisation.read(run, {}, "held-out")
    assert own.is_tokenized and own.name == data
    assert not personalisation.read(run, {"pretokenized": False}, "held-out").is_tokenized
    # Of other text, how the run's was read says nothing.
    assert not personalisation.read(run, {"data": data}, "held-out").is_tokenized


@pytest.mark.parametrize("given", [False, True], ids=["text of the run", "the same text, named"])
def test_test_users_whom_a_run_has_trained_on_are_no_test(tmp_path, given):
    toy_run.write_corpus(tmp_path)
    data = {"data": str(tmp_path / "users.jsonl")}
    (tmp_path / "run" / "private").mkdir(parents=True)
    manifest.Manifest({**data, "train_on_test_users": True}, {}, {}, {}).keep(tmp_path / "run")
    with pytest.raises(ValueError, match="has trained on the test users"):
        personalisation.read(tmp_path / "run", data if given else {}, "test")
    assert len(personalisation.read(tmp_path / "run", {}, "held-out"))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
