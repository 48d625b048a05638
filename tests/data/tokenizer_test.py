"""Tests of tff_dpftrl.data.tokenizer: one rule, two engines."""

from __future__ import annotations

import itertools
import pathlib
import random
import sys
import unicodedata

import pytest
import tensorflow as tf

from tff_dpftrl.data import jsonl, tokenizer

_SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"

_RULES = [
    tokenizer.Tokenizer(lower_case, is_tokenized)
    for lower_case, is_tokenized in itertools.product([True, False], repeat=2)
]

_ODD_TEXTS = [
    "",
    " \t\n",
    "a\u2028b\x1cc\x0bd\xa0e\u3000f\x85g\ufeffh",
    "1.2.3. .4 5,6 ² Ⅻ ٣",
    "don't 'quoted' o''clock rock'n'roll ''",
    "中文 x_y _ e\u0301 ß İ Σς ǅ 😀👍🏽",
    "...?!",
]


def _graph_words(rule, texts):
    ragged = tf.function(rule.split)(tf.constant(texts, tf.string))
    return [[word.decode() for word in words] for words in ragged.to_list()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop, it's 3.14!", ["don't", "stop", ",", "it's", "3.14", "!"]),
        ("x86_64 v2.0.", ["x", "86", "_", "64", "v", "2.0", "."]),
        ("a-b...", ["a", "-", "b", ".", ".", "."]),
        ("'tis Ü", ["'", "tis", "ü"]),
        ("", []),
    ],
)
def test_words(text, words):
    assert tokenizer.Tokenizer().words(text) == words


def test_case_can_be_kept():
    assert tokenizer.Tokenizer(lower_case=False).words("The End") == ["The", "End"]


def test_tokenized_text_is_only_cut_at_spaces():
    rule = tokenizer.Tokenizer(lower_case=False, is_tokenized=True)
    assert rule.words("found <URL> an front-end to  svn .") == [
        *("found", "<URL>", "an", "front-end", "to", "svn", ".")
    ]


@pytest.mark.parametrize("rule", _RULES)
def test_engines_agree_on_odd_texts(rule):
    assert _graph_words(rule, _ODD_TEXTS) == [rule.words(text) for text in _ODD_TEXTS]


def test_engines_agree_on_random_characters():
    # All characters below U+3000 but NUL, surrogates and what is not assigned,
    # which Python and RE2 may class by different versions of Unicode.
    characters = [chr(code) for code in range(1, 0x3000)]
    characters = [c for c in characters if unicodedata.category(c) not in ("Cs", "Cn")]
    rng = random.Random(0)
    common = list("aB1'._ -\n\u00a0")
    texts = ["".join(rng.choices(characters, k=20)) for _ in range(1000)]
    texts += ["".join(rng.choices(common, k=20)) for _ in range(1000)]
    rule = tokenizer.Tokenizer(lower_case=False)
    assert _graph_words(rule, texts) == [rule.words(text) for text in texts]


@pytest.mark.parametrize("name", ["ubuntu_irc_by_user", "shakespeare_by_role"])
def test_engines_agree_on_real_text(name):
    path = _SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared/data is not there")
    texts = list(itertools.islice(jsonl.read(path).texts(), 2000))
    rule = tokenizer.Tokenizer()
    assert _graph_words(rule, texts) == [rule.words(text) for text in texts]


def test_shakespeare_has_the_documented_number_of_words():
    path = _SHARED / "shakespeare_by_role.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared/data is not there")
    rule = tokenizer.Tokenizer()
    words = [word for text in jsonl.read(path).texts() for word in rule.words(text)]
    # ../shared/data/stats.txt: "tokens" and "vocabulary".
    assert (len(words), len(set(words))) == (989_153, 24_819)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
