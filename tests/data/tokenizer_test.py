"""Tests of tff_dpftrl.data.tokenizer: one rule, two engines."""

import itertools
import os
import pathlib
import random
import subprocess
import sys
import unicodedata

import pytest
import tensorflow as tf

from tff_dpftrl.data import jsonl, tokenizer

_SHARED = pathlib.Path(__file__).parents[3] / "shared"
_DATA = _SHARED / "data"

_RULES = [
    *(
        tokenizer.Tokenizer(lower_case, is_tokenized)
        for lower_case, is_tokenized in itertools.product([True, False], repeat=2)
    ),
    tokenizer.Tokenizer(version=tokenizer.NO_MARKS),
]

_ODD_TEXTS = [
    "",
    " \t\n",
    "a\u2028b\x1cc\x0bd\xa0e\u3000f\x85g\ufeffh",
    "1.2.3. .4 5,6 ² Ⅻ ٣",
    "don't 'quoted' o''clock rock'n'roll ''",
    "中文 x_y _ e\u0301 ß İ Σς ǅ 😀👍🏽",
    "...?!",
    "a\0b \0 \\1 \\ \ufffd",
    "ΑΣ ΑΣ' ΑΣ'Α ΑΣ.Α ΑΣ. ΑΣ1 Σ ΌΣΟΣ ΣΣ Σ\u0301 ΑΣ\u0301Α",
    "I İI i\u0307 I\u0307 J\u0300 Ì Ĩ Į K Å",
    "\u0301 \u200d\u0301a \u200d1\u0301.2 it’s ’tis a’\u0301b क्\u200dष ന്\u200d",
    "❤\ufe0f 👩\u200d💻 1\ufe0f\u20e3",
]


def _graph_words(rule, texts):
    if rule.version > tokenizer.NO_MARKS:  # TensorFlow cannot normalise.
        texts = [unicodedata.normalize("NFC", text) for text in texts]
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


@pytest.mark.parametrize("lower_case", [True, False])
def test_marks_and_joiners_belong_to_words(lower_case):
    path = _SHARED / "cases" / "scripts.tsv"
    if not path.exists():
        pytest.skip("../shared/cases is not there")
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    texts, expected = zip(*(line.split("\t") for line in lines), strict=True)
    rule = tokenizer.Tokenizer(lower_case)
    found = [rule.words(text) for text in texts]
    assert _graph_words(rule, texts) == found
    if not lower_case:
        found = [[word.lower() for word in words] for words in found]
    assert found == [unicodedata.normalize("NFC", words).split(" ") for words in expected]


def test_old_vocabularies_keep_their_rule():
    rule = tokenizer.Tokenizer(version=tokenizer.NO_MARKS)
    assert rule.words("में it’s e\u0301") == ["म", "\u0947", "\u0902", "it", "’", "s", "e", "\u0301"]


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


# Not surrogates, nor what is not assigned, which Python and RE2 may class by different
# versions of Unicode.
_NEWER_THAN_RE2 = range(0x2EBF0, 0x2EE5E)  # Of Unicode 15.1, which Python 3.13 has.
_CHARACTERS = [
    chr(code)
    for code in range(sys.maxunicode + 1)
    if unicodedata.category(chr(code)) not in ("Cs", "Cn") and code not in _NEWER_THAN_RE2
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", _RULES)
def test_engines_agree_on_every_character(rule):
    # Not by itself: letters and digits beside it tell of what kind it is, and two of a
    # kind make one word.
    texts = [f"x{c}y 1{c}2 {c}{c}" for c in _CHARACTERS]
    for start in range(0, len(texts), 20_000):
        part = texts[start : start + 20_000]
        assert _graph_words(rule, part) == [rule.words(text) for text in part]


@pytest.mark.parametrize("number", [250, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", _RULES)
def test_engines_agree_on_random_characters(rule, number):
    rng = random.Random(0)
    alphabets = [
        _CHARACTERS,
        _CHARACTERS[:3000],
        list("aB1'._ -\n\u00a0\0\\"),
        list("aΣ'.\u0301 Ιİ1"),
    ]
    texts = ["".join(rng.choices(few, k=20)) for few in alphabets for _ in range(number)]
    assert _graph_words(rule, texts) == [rule.words(text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["tr_TR.UTF-8", "lt_LT.UTF-8", "C"])
def test_the_locale_does_not_matter(locale):
    code = (
        "import sys, tensorflow as tf\n"
        "from tff_dpftrl.data import tokenizer\n"
        "rule, text = tokenizer.Tokenizer(), sys.argv[1].encode('utf-8', 'surrogateescape')\n"
        "found = [word.decode() for word in rule.split(tf.constant([text])).to_list()[0]]\n"
        "print(ascii(found), ascii(tf.strings.lower('I', 'utf-8').numpy().decode()))"
    )
    # An argument cannot hold a NUL.
    text = unicodedata.normalize("NFC", " ".join(_ODD_TEXTS).replace("\0", ""))
    child = subprocess.run(
        [sys.executable, "-c", code, text],
        env=os.environ | {"LC_ALL": locale},
        capture_output=True,
        text=True,
        check=True,
    )
    small_i = "ı" if locale.startswith("tr") else "i"  # So the locale was in force.
    assert child.stdout.strip() == f"{ascii(tokenizer.Tokenizer().words(text))} {ascii(small_i)}"


@pytest.mark.parametrize("name", ["ubuntu_irc_by_user", "shakespeare_by_role"])
def test_engines_agree_on_real_text(name):
    path = _DATA / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared/data is not there")
    texts = list(itertools.islice(jsonl.read(path).texts(), 2000))
    rule = tokenizer.Tokenizer()
    assert _graph_words(rule, texts) == [rule.words(text) for text in texts]


def test_shakespeare_has_the_documented_number_of_words():
    path = _DATA / "shakespeare_by_role.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared/data is not there")
    rule = tokenizer.Tokenizer()
    words = [word for text in jsonl.read(path).texts() for word in rule.words(text)]
    # ../shared/data/stats.txt: "tokens" and "vocabulary".
    assert (len(words), len(set(words))) == (989_153, 24_819)
