"""Bits and whole words that can be compared between tokenizers."""

import math
import pathlib
import sys
import types

import numpy as np
import pytest

from tff_dpftrl.data import subword_learning, user_text, vocabulary

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "experiments"))
import tokenizer_utility as utility

_TEXT = "it's late, the later (latest) the, better"
_CORPUS = user_text.UserText.from_mapping("toy", {"a": [_TEXT] * 3 + ["the the, late lat er"]})
_KINDS = ("words", "wordpiece", "sentencepiece")


def _learn(kind, size=None):
    if kind == "words":
        return vocabulary.most_frequent(_CORPUS, size or 3, source="toy")
    size = size or (48 if kind == "wordpiece" else 300)
    return subword_learning.learn(_CORPUS, size, kind=kind, source="toy")


def test_a_word_is_charged_by_its_letters():
    code = utility.SpellingCode(["ab"], order=1)
    # Of three letters, the mark of the end included, each occurs once.
    empty = {letter: (1 + 3 / 4) / 6 for letter in "ab\n"} | {"é": (3 / 4) / 6}
    seen = {letter: (1 + share) / 2 for letter, share in empty.items()}
    bits = -sum(math.log2(seen[letter]) for letter in "ab\n")
    assert code.bits("ab") == pytest.approx(bits)
    # After "é" nothing is known.
    bits = -math.log2(empty["é"] / 2) + math.log2(0x110000) - math.log2(empty["\n"])
    assert code.bits("é") == pytest.approx(bits)


def test_letters_have_probabilities_that_sum_to_one():
    code = utility.SpellingCode(["ab", "abba", "cab", "b"])
    ends = [2.0 ** -code.bits(word) for word in ("", *"abc")]
    assert 0 < sum(ends) < 1
    longer = utility.SpellingCode(["abba"] * 50)
    assert longer.bits("abba") < longer.bits("baab")


@pytest.mark.parametrize("kind", _KINDS)
def test_words_are_found_among_the_targets(kind):
    words = _learn(kind)
    found, tokens = utility.places(_TEXT, words), words.rule().words(_TEXT)
    assert found.words == [
        *("it's", "late", ",", "the", "later", "(", "latest", ")", "the", ",", "better")
    ]
    spelled = [tokens[first:end] for first, end in found.spans]
    if kind == "sentencepiece":
        read = [b"".join(map(utility.bytes_of, pieces)).decode() for pieces in spelled]
        assert all(word in text for word, text in zip(found.words, read, strict=True))
        assert found.spans[0][0] == 0 and found.spans[-1][1] == len(tokens)
        # "latest" follows a bracket, "late" follows letters that it could be a part of.
        free = dict(zip(found.words, found.is_free, strict=True))
        assert free["latest"] and not free["late"]
    else:
        read = ["".join(piece.removeprefix("##") for piece in pieces) for pieces in spelled]
        assert read == found.words
    assert all(found.is_known) == (kind != "words")


def _measured(kind, monkeypatch, guess):
    """Measures a model that guesses `guess(targets)`, at a bit for each target."""
    words = _learn(kind)

    def score(trained, rows):
        targets = rows[:, 1:]
        best = guess(targets.copy(), words)
        return np.ones(targets.shape), best, best

    monkeypatch.setattr(utility, "score", score)
    trained = types.SimpleNamespace(words=words, model=types.SimpleNamespace(sequence_length=5))
    return utility.measure(trained, [_TEXT], utility.SpellingCode(["late"])), words


@pytest.mark.parametrize("kind", _KINDS)
def test_who_guesses_all_is_right_but_for_unknown_words(kind, monkeypatch):
    found, words = _measured(kind, monkeypatch, lambda targets, words: targets)
    assert found["word accuracy"] == pytest.approx(1 - found["unknown"])
    assert (found["unknown"] > 0) == (kind == "words")
    assert (found["bits with spelling"] > found["bits"]) == (kind == "words")
    num_targets = len(words.rule().words(_TEXT)) + 1
    assert found["bits"] == pytest.approx(num_targets / len(_TEXT), abs=1.01 / len(_TEXT))


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_a_word_that_goes_on_is_wrong(kind, monkeypatch):
    """Guesses the right beginning of each word, and a letter where a word ends."""

    def goes_on(targets, words):
        (more,) = np.flatnonzero(utility.continuing(words))[:1]
        begins = ~utility.continuing(words)[targets]
        begins[:, 0] = False
        return np.where(
            begins & (np.arange(targets.size).reshape(targets.shape) > 0), more, targets
        )

    found, _ = _measured(kind, monkeypatch, goes_on)
    assert found["word accuracy"] < 0.5


def test_the_table_has_means_and_errors():
    row = {"corpus": "irc", "tokenizer": "words", "noise": "blt", "unknown": "0.2"}
    rows = [
        row | {"seed": str(seed), "bits": b, "bits with spelling": "3", "word accuracy": "0.1"}
        for seed, b in enumerate(("1.0", "2.0"))
    ]
    counted = row | {"noise": "bigrams", "bits": "", "word accuracy": "0.15"}
    made, counts = utility.summary([*rows, counted])
    assert made["bits per character"] == "1.500 ± 0.500"
    assert made["whole words predicted"] == "10.00 ± 0.00 %"
    assert (counts["bits per character"], counts["whole words predicted"]) == ("", "15.00 %")
