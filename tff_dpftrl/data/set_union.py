"""Words of protected users, counted with noise: differentially private set union.

The weighted Gaussian mechanism of Gopi et al. 2020 (Differentially Private Set Union, ICML): each
user gives n words, at most Δ₀, a weight of 1 / √n each; Gaussian noise of standard deviation σ is
added to the weight of each word that anybody gives; words whose noised weight is above a threshold
are released, in the order of noised weights. Which words a user gives is a function of this user's
texts, and of public words, only.

**Why it is private.** Data D' has one user more than D, with n words; t of them are nobody else's.
The weights of the other words differ by an L2 norm of at most 1: on these, a release is a Gaussian
mechanism with μ = 1 / σ. Each of the t words has a weight of 1 / √n ≤ 1 / √t, so that all stay
below the threshold τ with a probability of at least Φ((τ - 1 / √t) / σ)ᵗ, independently of the
others. `Counting.threshold` is the least τ for which this is 1 - δ or more for all t ≤ Δ₀. So a
release on D' is the Gaussian mechanism but for a probability of δ, which is added to the δ of
whatever it is composed with. From D to D' privacy losses grow by -ln(1 - δ), which costs
δ / (1 - δ) times the probability of a loss above ε: less than δ, for every ε above the median loss.

The paper takes half of its δ for the noise and half for the threshold; `Counting.delta` is that of
the threshold alone. No trace of a word below it is in the output: neither its weight, nor how many
there were.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import math
import pathlib
import random
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from scipy import stats

from tff_dpftrl import validation
from tff_dpftrl.data import tokenizer, user_text, vocabulary

MAX_WORDS = 100
"""Number of words that a user gives at most.

On the docstrings of the quickstart, 50 to 200 words gave the same coverage, and 20 less.
"""

_WHERE_NONE_IS_FOUND = ("the",)  # A vocabulary has one word at least.


@dataclasses.dataclass(frozen=True)
class Counting:
    """Parameters of a count with noise.

    Attributes:
      noise_multiplier: Standard deviation σ of the noise; a user's weights have an L2 norm of at
        most 1.
      delta: Probability δ with which a word of one user alone may be released.
      max_words: Largest number Δ₀ of words of a user that are counted.
    """

    noise_multiplier: float
    delta: float
    max_words: int = MAX_WORDS

    def __post_init__(self):
        validation.positive("noise_multiplier", self.noise_multiplier)
        validation.delta(self.delta)
        validation.integer("max_words", self.max_words, minimum=1)

    @property
    def rho_zcdp(self) -> float:
        """The ρ of zCDP of the Gaussian mechanism, without what `delta` allows."""
        return 0.5 / self.noise_multiplier**2

    @functools.cached_property
    def threshold(self) -> float:
        """Threshold ρ = max over t of 1 / √t + σ Φ⁻¹((1 - δ)^(1/t)), t = 1, ..., Δ₀."""
        t = np.arange(1, self.max_words + 1)
        tail = -np.expm1(np.log1p(-self.delta) / t)  # 1 - (1 - δ)^(1/t), exact for a small δ.
        return float(np.max(1.0 / np.sqrt(t) + self.noise_multiplier * stats.norm.isf(tail)))


def words_of_user(words: Iterable[str], max_words: int) -> list[str]:
    """Returns the most frequent words of one user, ties in alphabetical order."""
    counts = collections.Counter(words)
    return heapq.nsmallest(max_words, counts, key=lambda word: (-counts[word], word))


def weights(
    corpus: user_text.UserText,
    rule: vocabulary.Rule,
    max_words: int,
    known: Collection[str] = (),
) -> dict[str, float]:
    """Adds up the users' weights of their words, without noise: secret.

    A user adds a vector of norm 1, or nothing. Words in `known` are public, and not counted.
    """
    known = frozenset(known)
    sums: dict[str, float] = collections.defaultdict(float)
    for user in corpus.user_ids:
        texts = corpus.examples(user)
        own = (word for text in texts for word in rule.words(text) if word not in known)
        given = words_of_user(own, max_words)
        for word in given:
            sums[word] += 1.0 / math.sqrt(len(given))
    return dict(sums)


def release(
    weights: Mapping[str, float], counting: Counting, seed: int | None = None
) -> tuple[str, ...]:
    """Returns the words whose noised weight is above the threshold, by falling noised weight.

    `seed` is for tests: whoever knows it can subtract the noise. If None, each draw is from the
    operating system's generator.
    """
    generator = random.SystemRandom() if seed is None else random.Random(seed)
    deviation = counting.noise_multiplier
    # In the order of the words, so that a seed gives the same words for the same data.
    noised = {word: weights[word] + generator.gauss(0.0, deviation) for word in sorted(weights)}
    above = [word for word, weight in noised.items() if weight > counting.threshold]
    return tuple(sorted(above, key=lambda word: (-noised[word], word)))


def add_words(
    public: vocabulary.Vocabulary | None,
    corpus: user_text.UserText,
    size: int,
    counting: Counting,
    *,
    lower_case: bool = True,
    seed: int | None = None,
) -> vocabulary.Vocabulary:
    """Adds words of protected users, counted with noise, to a public vocabulary.

    The first half of the public words is kept, and not counted. Then come the released words, and
    then as many of the other public words as there is room for. So the number of words does not
    depend on the users, and the budget is not spent on words like "the". `public` has the best
    words first; None for the users' words alone. `seed` is for tests; None for the operating
    system's generator.
    """
    validation.integer("size of the vocabulary", size, minimum=1)
    before = () if public is None else public.words
    head = before[: size // 2]
    word_rule = tokenizer.LATEST if public is None else public.word_rule
    rule = tokenizer.Tokenizer(lower_case, corpus.is_tokenized, word_rule)
    found = release(weights(corpus, rule, counting.max_words, head), counting, seed)
    # A refusal where nothing is found would show a draw that no record charges: who tries again
    # draws again.
    words = tuple(dict.fromkeys((*head, *found, *before)))[:size] or _WHERE_NONE_IS_FOUND
    source = (
        f"words of the training users of {pathlib.PurePath(corpus.name).name}, counted with noise"
    )
    if not found and public is None:
        source += ": none is released, and one public word stands in for them"
    if public is not None:
        source += f", in the place of rare ones of a public list: {public.source}"
    return vocabulary.Vocabulary(
        words, source, lower_case, is_public=False, is_noised=True, word_rule=word_rule
    )
