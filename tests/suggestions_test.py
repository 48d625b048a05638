"""Suggestions of a keyboard, against loops over one word at a time."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from experiments import suggestions
from tff_dpftrl.models import evaluation, held_out, metrics, word_lstm

# Ids: padding 0, words 1 to 16, out of vocabulary 17, beginning 18, end 19.
_WORDS = tuple("a I the The cat car bat far tree free trie it's 42 of if or".split())
_SPECIAL = metrics.SpecialIds(oov=17, bos=18, eos=19)
_MODEL = word_lstm.WordLstm(20, sequence_length=4, embedding_size=3, state_size=5)


def _sequences(count=150):
    rng = np.random.default_rng(1)
    rows = rng.integers(1, 18, [count, 5])
    rows[:, 0] = 18
    for row in rows:
        length = rng.integers(1, 6)
        row[length:] = 0
        if length < 5:
            row[length] = 19
    return rows.astype(np.int32)


def _typed(sequences):
    return suggestions.TypedWords.create(sequences, _SPECIAL, _WORDS)


def _measure(batches, typed):
    meter = suggestions.Meter(typed)
    for batch in batches:
        meter.add(batch)
    return meter.result()


def _one_at_a_time(sequences):
    """Target of each word, and whether a word comes before it."""
    pairs = itertools.chain.from_iterable(itertools.pairwise(row) for row in sequences.tolist())
    return [(target, 1 <= before <= 17) for before, target in pairs if 1 <= target <= 17]


def test_suggestions_are_judged_word_by_word():
    sequences = _sequences()
    words = _one_at_a_time(sequences)
    rng = np.random.default_rng(2)
    given = rng.dirichlet(np.full(20, 0.15), len(words)).round(2)  # With ties.
    given[np.arange(len(words)), [target for target, _ in words]] += rng.random(len(words)) < 0.3
    given += 1e-6  # No row is of zeros.
    found = _measure(np.split(given, [7, 100]), _typed(sequences))
    picked, right, confidences = [], [], []
    for (target, follows), row in zip(words, given.tolist(), strict=True):
        known = row[1:17]
        rank = sum(p >= row[target] for p in known) if target <= 16 else math.inf
        picked += [rank <= 3] if follows else []
        right.append(rank == 1)
        confidences.append(max(known) / sum(known))
    assert (found["words"], found["words_after_another"]) == (len(words), len(picked))
    assert found["picked_at_3"] == pytest.approx(np.mean(picked))
    for threshold in suggestions.THRESHOLDS:
        shown = [r for r, c in zip(right, confidences, strict=True) if c >= threshold]
        expected = {"triggered": len(shown) / len(words), "accepted": np.mean(shown)}
        assert found["thresholds"][str(threshold)] == pytest.approx(expected)
    rates = [
        len(shown) / len(words)
        for limit in confidences
        for shown in [[r for r, c in zip(right, confidences, strict=True) if c >= limit]]
        if sum(shown) >= 0.5 * len(shown)
    ]
    assert found["triggered"] == pytest.approx(max(rates)) and 0 < max(rates) < 1


def test_words_of_a_confidence_are_triggered_together():
    confidence, right = np.array([0.9, 0.5, 0.5, 0.5, 0.2]), np.array([1, 1, 0, 0, 0], bool)
    # In its order, the first two of 0.5 would keep 2 of 3; all of them do 2 of 4.
    assert suggestions.triggered_at(confidence, right, 0.5) == 0.8
    assert suggestions.triggered_at(confidence, right, 0.6) == 0.2
    assert suggestions.triggered_at(confidence, ~right, 0.9) == 0.0
    assert suggestions.triggered_at(confidence[:0], right[:0], 0.5) is None


def test_a_perfect_model_and_one_that_knows_nothing():
    sequences = _sequences()
    targets = np.array([target for target, _ in _one_at_a_time(sequences)])
    known = np.mean(targets <= 16)
    perfect = _measure([np.eye(20)[targets]], _typed(sequences))
    follows = [target <= 16 for target, follows in _one_at_a_time(sequences) if follows]
    assert perfect["picked_at_3"] == np.mean(follows)  # Nobody suggests an unknown word.
    assert perfect["thresholds"]["0.7"] == {"triggered": pytest.approx(known), "accepted": 1.0}
    assert perfect["rescored"] == perfect["among_candidates"] >= perfect["decoder"]
    uniform = np.full([len(targets), 20], 1 / 20)
    nothing = _measure([uniform], _typed(sequences))
    assert nothing["picked_at_3"] == nothing["triggered"] == 0.0  # A tie is no guess.
    assert nothing["thresholds"]["0.1"] == {"triggered": 0.0, "accepted": None}  # 1 / 16 is less.
    assert nothing["rescored"] == nothing["decoder"] == perfect["decoder"]
    for broken in (np.full([len(targets), 20], np.nan), np.zeros([len(targets), 20])):
        assert _measure([broken], _typed(sequences)) == nothing


def test_taps_are_decoded_by_their_distances():
    sequences = _sequences()
    typed = _typed(sequences)
    centres = {"q": (0, 0), "p": (9, 0), "a": (0.5, 1), "z": (1.5, 2), "m": (7.5, 2)}
    keys = suggestions._KEYS
    assert centres.items() <= keys.items() and len(keys) == 26
    rng = np.random.default_rng(suggestions._SEED)
    decoded = np.zeros(len(typed.targets), bool)
    for length in (1, 2, 3, 4):
        same = [i for i, w in enumerate(_WORDS, 1) if len(w) == length and w.isalpha()]
        for n in np.flatnonzero(np.isin(typed.targets, same)):
            decoded[n] = True
            word = _WORDS[typed.targets[n] - 1].lower()
            noise = suggestions.TAP_STDDEV * rng.standard_normal(2 * length)
            taps = [
                np.add(suggestions._KEYS[c], noise[2 * i : 2 * i + 2]) for i, c in enumerate(word)
            ]
            density = [
                -sum(
                    math.dist(t, suggestions._KEYS[c]) ** 2
                    for t, c in zip(taps, other, strict=True)
                )
                / (2 * suggestions.TAP_STDDEV**2)
                for other in (_WORDS[i - 1].lower() for i in same)
            ]
            assert typed.candidates[n, : len(same)].tolist() == same
            scores = typed.scores[n, : len(same)]
            np.testing.assert_allclose(scores - scores[0], np.subtract(density, density[0]))
    # Nobody types an unknown word here, an apostrophe or a digit: "it's" and "42".
    assert not decoded[np.isin(typed.targets, [12, 13, 17])].any()
    assert np.isinf(typed.scores[~decoded]).all() and decoded.sum() > 100


def test_a_decoder_with_the_true_prior_is_as_often_right_as_bayes_rule_says():
    words = tuple("of if or on in is it at as us".split())
    special = metrics.SpecialIds(oov=11, bos=12, eos=13)
    prior = 2.0 ** -np.arange(1, 11) / (1 - 2.0**-10)
    rng = np.random.default_rng(3)
    sequences = np.concatenate(
        [np.full([1000, 1], 12), 1 + rng.choice(10, [1000, 5], p=prior)], axis=1
    )
    typed = suggestions.TypedWords.create(sequences, special, words)
    given = np.concatenate([[0.0], prior, [0.0, 0.0, 0.0]])
    found = _measure([np.tile(given, [2500, 1])] * 2, typed)
    posterior = np.exp(typed.scores - typed.scores.max(axis=1, keepdims=True))
    posterior *= given[typed.candidates]
    best = posterior.max(axis=1) / posterior.sum(axis=1)
    error = math.sqrt(np.mean(best * (1 - best)) / len(best))
    assert abs(found["rescored"] - best.mean()) < 4 * error
    assert found["rescored"] > found["decoder"] + 10 * error
    assert found["among_candidates"] == 1.0 and found["words_decoded"] == 5000


def test_models_are_predictors():
    sequences = _sequences()
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=s).astype(np.float32) for s in _MODEL.weight_shapes.values()]
    typed = _typed(sequences)
    everywhere = suggestions.Meter(dataclasses.replace(typed, follows_word=typed.targets > 0))

    def add(rows, positions, shares):
        everywhere.add(shares)
        return shares

    held_out.predict_words(_MODEL, weights, _SPECIAL, sequences, mix=add)
    # With first words, it is the accuracy that counts unknown words as wrong.
    pooled = evaluation.Evaluator(_MODEL, _SPECIAL, sequences)(weights)
    picked = everywhere.result()["picked_at_3"]
    assert picked == pytest.approx(pooled["top3_oov_wrong"], rel=1e-6) and picked > 0.1


def test_nothing_to_predict_has_no_figures():
    typed = suggestions.TypedWords.create(np.array([[18, 19, 0, 0, 0]]), _SPECIAL, None)
    found = _measure([], typed)
    assert (found["words"], found["words_decoded"]) == (0, 0)
    assert found["picked_at_3"] is found["triggered"] is found["rescored"] is None


def test_each_word_is_predicted_once():
    typed = _typed(_sequences())
    words = len(typed.targets)
    with pytest.raises(ValueError, match="0 are left, got 1 distributions"):
        _measure([np.ones([words, 20]), np.ones([1, 20])], typed)
    with pytest.raises(ValueError, match=f"given {words} distributions before result, got 1"):
        _measure([np.ones([1, 20])], typed)
