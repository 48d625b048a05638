"""Near-duplicates are found by hashing as by comparing every pair."""

import math
import random

import pytest

from tff_dpftrl.data import near_duplicates, user_text

_WORDS = [a + b for a in "bdfgkmnprt" for b in "aeiou"]


def _corpus(texts_of):
    return user_text.UserText.from_mapping("corpus", texts_of)


def _text(rng, words):
    return " ".join(rng.choices(_WORDS, k=words))


def _runs(text):
    words = text.split()
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def _similarity(one, other):
    one, other = _runs(one), _runs(other)
    return len(one & other) / len(one | other)


def _edited(rng, text):
    """A text with some words replaced, from none to half of them."""
    words = text.split()
    for place in rng.sample(range(len(words)), rng.randrange(len(words) // 4)):
        words[place] = rng.choice(_WORDS)
    return " ".join(words)


def test_hashing_finds_what_comparing_all_pairs_finds():
    pytest.importorskip("datasketch")
    rng = random.Random(0)
    theirs = [_text(rng, rng.randint(3, 40)) for _ in range(120)]
    ours = [_edited(rng, text) if len(text.split()) > 7 else text for text in theirs]
    ours += [_text(rng, 20) for _ in range(40)]
    closest = {text: max(_similarity(text, other) for other in theirs) for text in set(ours)}
    kept, left_out = near_duplicates.without(
        _corpus({f"user{i}": ours[i::7] for i in range(7)}), [_corpus({"ada": theirs})]
    )
    kept = set(kept.texts())
    assert left_out == sum(text not in kept for text in ours) > 40
    # Nothing is left out that is less similar, whatever the hashes are.
    assert all(closest[text] >= near_duplicates.SIMILARITY for text in ours if text not in kept)
    # A pair of similarity s is missed with probability (1 - s³)²⁰; five standard deviations.
    near = {text for text in ours if closest[text] >= near_duplicates.SIMILARITY}
    missed = sum((1.0 - closest[text] ** 3) ** 20 for text in near)
    assert len(near & kept) <= missed + 5.0 * math.sqrt(missed)
    assert sum(closest[text] < 1.0 for text in near) > 20 and missed < 0.1 * len(near)


def test_case_blanks_and_punctuation_make_no_difference():
    pytest.importorskip("datasketch")
    public = {
        "bo": ["It is,   done!", "It is done again and again", "!!!", ""],
        "cy": ["IT IS DONE"],
        "di": ["yes", "no"],
    }
    kept, left_out = near_duplicates.without(_corpus(public), [_corpus({"ada": ["it is done no"]})])
    assert {user: kept.examples(user) for user in kept.user_ids} == {
        "bo": ["It is done again and again", "!!!", ""],
        "di": ["yes", "no"],
    }
    assert left_out == 2
    # "it is done" is half of the two runs of the longer text, and one word alone is a whole text.
    _, left_out = near_duplicates.without(_corpus(public), [_corpus({"ada": ["No", "???"]})])
    assert left_out == 1
    # One letter, or a letter and its accent.
    _, left_out = near_duplicates.without(
        _corpus({"bo": ["cafe\u0301 ferme\u0301"]}), [_corpus({"ada": ["caf\u00e9 ferm\u00e9"]})]
    )
    assert left_out == 1


def test_nothing_in_common_leaves_the_corpus_as_it_is():
    pytest.importorskip("datasketch")
    public = {"bo": ["a b c d e", "f g h"], "cy": [" f  g h "]}
    for others in ([], [_corpus({})], [_corpus({"ada": ["x y z", "b c"]})]):
        kept, left_out = near_duplicates.without(_corpus(public), others)
        assert left_out == 0
        assert {user: kept.examples(user) for user in kept.user_ids} == public
