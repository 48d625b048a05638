"""Tests of tff_dpftrl.data.set_union."""

import math
import random
import statistics

import numpy as np
import pytest
from scipy import optimize

from tff_dpftrl import validation
from tff_dpftrl.data import set_union, tokenizer, user_text, vocabulary

_RULE = tokenizer.Tokenizer()
_NORMAL = statistics.NormalDist()


def _corpus(users):
    return user_text.UserText.from_mapping("m", users)


def _common(count=60):
    """Users who all have the words aa to ae, and one word each that nobody else has."""
    return {f"u{i}": ["aa ab ac ad ae", f"own{'x' * i}"] for i in range(count)}


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("delta", [0.2, 1e-3, 1e-7])
def test_the_threshold_is_the_least_that_hides_any_user(sigma, delta):
    """Solves for the threshold by the probabilities, of which the formula is the inverse."""
    counting = set_union.Counting(sigma, delta, max_words=8)

    def released(threshold, t):
        """Probability that one of t words of one user is released: 1 - (1 - tail)^t."""
        tail = 0.5 * math.erfc((threshold - 1.0 / math.sqrt(t)) / sigma / math.sqrt(2.0))
        return -math.expm1(t * math.log1p(-min(tail, 0.999)))

    def worst(threshold):
        return max(released(threshold, t) for t in range(1, 9))

    least = optimize.brentq(lambda x: worst(x) - delta, 0.0, 1.0 + 20.0 * sigma, xtol=1e-12)
    assert counting.threshold == pytest.approx(least, rel=1e-6)
    assert worst(counting.threshold) == pytest.approx(delta, rel=1e-6)
    assert worst(counting.threshold - 0.05 * sigma) > delta


def test_the_worst_user_gives_one_word_or_many():
    # With little noise the weight of a single word decides, with much the number of words.
    def threshold(sigma, max_words):
        return set_union.Counting(sigma, 1e-6, max_words).threshold

    alone = 1.0 + 0.2 * _NORMAL.inv_cdf(1 - 1e-6)
    assert threshold(0.2, 1) == threshold(0.2, 50) == pytest.approx(alone)
    assert threshold(20.0, 50) > threshold(20.0, 1)


@pytest.mark.parametrize("num_words", [1, 4])
def test_words_of_one_user_are_released_with_a_probability_of_delta(num_words):
    """Simulates a user whose words nobody else has; t = 4 is the worst for this much noise."""
    delta, repetitions = 0.1, 3000
    counting = set_union.Counting(3.0, delta, max_words=num_words)
    worst = max(
        range(1, num_words + 1),
        key=lambda t: 1 / math.sqrt(t) + 3.0 * _NORMAL.inv_cdf((1 - delta) ** (1 / t)),
    )
    assert worst == num_words
    own = " ".join("abcd"[:num_words])
    weights = set_union.weights(_corpus({"u": [own]}), _RULE, num_words)
    released = sum(bool(set_union.release(weights, counting, seed)) for seed in range(repetitions))
    # Five standard deviations of a binomial share: 0.027 of 0.1. A δ twice as large would fail.
    assert released / repetitions == pytest.approx(delta, abs=5 * math.sqrt(0.09 / repetitions))


def test_a_user_gives_a_vector_of_norm_one_whatever_they_write():
    rng = random.Random(3)
    for num_texts in range(5):
        texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(0, 9))) for _ in range(num_texts)]
        alone = set_union.weights(_corpus({"u": texts}), _RULE, 3)
        assert len(alone) <= 3
        assert math.fsum(w * w for w in alone.values()) == pytest.approx(1.0 if alone else 0.0)
        others = {"v": ["a b c"], "w": ["a h"]}
        without = set_union.weights(_corpus(others), _RULE, 3)
        both = set_union.weights(_corpus(others | {"u": texts}), _RULE, 3)
        # What a user adds depends on no other user.
        added = {word: both[word] - without.get(word, 0.0) for word in both}
        assert {w: v for w, v in added.items() if v > 1e-9} == pytest.approx(alone)


def test_the_most_frequent_words_of_a_user_are_counted():
    corpus = _corpus({"u": ["c c c b b the a", "the the d the"]})
    assert set_union.words_of_user("c c b a".split(), 2) == ["c", "a"]
    assert set(set_union.weights(corpus, _RULE, 2)) == {"c", "the"}
    assert set(set_union.weights(corpus, _RULE, 3, known=["the"])) == {"c", "b", "a"}
    assert set_union.weights(corpus, _RULE, 4)["a"] == pytest.approx(0.5)


def test_neither_users_nor_hashes_decide_the_order():
    """Of many words of the same weight, the order is that of the noise, whoever comes first."""
    users = _common()
    counting = set_union.Counting(0.5, 1e-3, max_words=6)
    found = set()
    for seed in range(3):
        names = random.Random(seed).sample(sorted(users), len(users))
        corpus = _corpus({name: users[name] for name in names})
        weights = set_union.weights(corpus, _RULE, 6)
        shuffled = dict(random.Random(seed).sample(sorted(weights.items()), len(weights)))
        found.add(set_union.release(shuffled, counting, 1))
    assert len(found) == 1
    assert sorted(*found) == ["aa", "ab", "ac", "ad", "ae"]
    # Other noise, another order: that of the words, or of the weights, is not what comes out.
    orders = {set_union.release(weights, counting, seed) for seed in range(20)}
    assert len(orders) > 5


def test_without_a_seed_noise_is_of_the_operating_system(monkeypatch):
    asked = []
    weights = dict.fromkeys("abcdefgh", 3.0)
    counting = set_union.Counting(1.0, 0.01, 8)

    class Generator(random.SystemRandom):
        def getrandbits(self, k):
            return super().getrandbits(k)

        def random(self):
            asked.append(1)
            return super().random()

    monkeypatch.setattr(random, "SystemRandom", Generator)
    drawn = {set_union.release(weights, counting) for _ in range(10)}
    assert len(asked) >= 80 and len(drawn) > 3


def test_noise_is_gaussian_of_the_stated_deviation():
    """Counts how often a word far below and above the threshold is released."""
    counting = set_union.Counting(2.0, 0.01, 1)
    weights = {f"w{i}": counting.threshold - 1.0 for i in range(20000)}
    share = len(set_union.release(weights, counting, 5)) / len(weights)
    # Φ(-0.5) = 0.3085, with a standard deviation of 0.0033. A deviation of 1.8 would give 0.289.
    assert share == pytest.approx(_NORMAL.cdf(-0.5), abs=0.014)


@pytest.mark.parametrize("size", [2, 5, 9])
def test_words_take_the_place_of_rare_public_ones(size):
    public = vocabulary.Vocabulary(("the", "aa", "rare", "rarer", "rarest"), "a book")
    counting = set_union.Counting(0.1, 1e-3, max_words=6)
    found = set_union.add_words(public, _corpus(_common()), size, counting, seed=2)
    head = public.words[: size // 2]
    released = found.words[len(head) :][: 5 - head.count("aa")]
    assert found.words[: len(head)] == head
    assert set(released) <= {"aa", "ab", "ac", "ad", "ae"} - set(head)
    # What is left of the size, if anything, has public words again, in their order.
    rest = [word for word in public.words if word not in (*head, *released)]
    assert (
        list(found.words[len(head) + len(released) :]) == rest[: size - len(head) - len(released)]
    )
    assert len(found.words) == size and found.is_noised and not found.is_public
    assert found.source == (
        "words of the training users of m, counted with noise, in the place of rare ones of a "
        "public list: a book"
    )


def test_users_words_alone_may_be_none_at_all():
    counting = set_union.Counting(0.1, 1e-3)
    alone = set_union.add_words(None, _corpus(_common()), 3, counting, seed=1)
    assert len(alone.words) == 3 and set(alone.words) < {"aa", "ab", "ac", "ad", "ae"}
    # A refusal would show a draw that nothing charges.
    none = set_union.add_words(None, _corpus({"u": ["a"]}), 3, counting, seed=1)
    assert none.words == ("the",) and none.is_noised
    assert none.source.endswith(": none is released, and one public word stands in for them")
    with pytest.raises(validation.UsageError, match="size of the vocabulary must be at least 1"):
        set_union.add_words(None, _corpus(_common()), 0, counting)


def test_what_it_costs_is_that_of_its_noise():
    # μ = 1 / σ, and ρ = μ² / 2.
    assert set_union.Counting(4.0, 1e-6).rho_zcdp == pytest.approx(1.0 / 32.0)


@pytest.mark.parametrize(
    "options", [(0.0, 1e-6, 5), (np.inf, 1e-6, 5), (1.0, 0.0, 5), (1.0, 1.0, 5), (1.0, 1e-6, 0)]
)
def test_parameters_out_of_range_are_refused(options):
    with pytest.raises(validation.UsageError, match="noise_multiplier|delta|max_words"):
        set_union.Counting(*options)
