"""The tokenizer: one rule from text to words, for Python and for TensorFlow graphs.

A word is a run of letters, with apostrophes inside ("don't"); a number is a run of
digits, with points inside ("3.11"); any other visible character is a word by itself. Combining
marks, joiners and non-joiners belong to the character before them (Unicode's UAX #29, rule WB4).
`Tokenizer.words` applies the rule with `re`, which is several times faster on the host.
`Tokenizer.split` applies it inside a graph, with operations of TensorFlow's core, so that a
SavedModel that splits text loads without any other package.

`words` normalises texts to NFC first. TensorFlow's core has no normalisation: `split` wants texts
that are normalised. The two then agree on every character that Python's Unicode database and
RE2's (15.0) know, in any locale. RE2 knows some more letters, marks and digits (4,388 letters and
digits for Python 3.11), and Python 3.13 the 622 ideographs that Unicode 15.1 added: each is a word
by itself for the one that does not know it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

NO_MARKS = 1
"""Rule of versions up to 0.4: each mark and joiner is a word by itself; nothing is normalised."""

LATEST = 2
"""Rule of new vocabularies."""

_RE2_SPACES = r"\s\v\x{1c}-\x{1f}\x{85}\p{Z}"
_RE2_LETTER, _RE2_DIGIT = r"[\p{L}\p{Nl}\p{No}]", r"\p{Nd}"
# Python's `re` has no \p{L}; `[^\W\d_]` is the same set as [\p{L}\p{Nl}\p{No}].
_LETTER, _DIGIT, _OTHER = r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)"
_JOINERS = "\u200c\u200d"


def _pattern(letter: str, digit: str, other: str, marks: str | None) -> str:
    """Returns the regular expression of a word, given those of single characters."""
    if marks is None:
        return rf"{letter}+(?:'{letter}+)*|{digit}+(?:\.{digit}+)*|{other}"
    letters, digits = (rf"{kind}+(?:{marks}{kind}*)*" for kind in (letter, digit))
    return rf"{letters}(?:['’]{letters})*|{digits}(?:\.{digits})*|{other}{marks}*"


@functools.cache
def _word(version: int, is_basic: bool = True) -> re.Pattern[str]:
    """Returns the expression of a word, of texts of Unicode's Basic Multilingual Plane or any."""
    marks = rf"[{_JOINERS}{_marks(is_basic)}]" if version > NO_MARKS else None
    return re.compile(_pattern(_LETTER, _DIGIT, _OTHER, marks))


def _marks(is_basic: bool) -> str:
    """Returns all combining marks, in planes that can have any, as ranges of a class of `re`."""
    codes = range(0x10000) if is_basic else (*range(0x20000), *range(0xE0000, 0xE0200))
    is_mark = [unicodedata.category(chr(code))[0] == "M" for code in codes]
    runs = itertools.groupby(range(len(codes)), is_mark.__getitem__)
    marks = [[codes[index] for index in run] for has_marks, run in runs if has_marks]
    return "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in marks)


# Thai, Lao, Burmese, Khmer, kana and Chinese characters.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
)
_MANY_UNSPACED = 0.1  # Share of such characters from which on words are too long to be learned.

# TensorFlow lower-cases up to the first NUL only; CommonMark replaces it in the same way.
_NUL, _REPLACEMENT = "\0", "\ufffd"
_SIGMA, _DOTTED_I = "Σ", "İ"


def normalised(text: str, version: int = LATEST) -> str:
    """Returns a text as this version of the rule reads it: in NFC."""
    return unicodedata.normalize("NFC", text) if version > NO_MARKS else text


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of text into words.

    Attributes:
      lower_case: Whether words are lower-cased.
      is_tokenized: Whether texts are words separated by white space already, as
        in TFF's Stack Overflow; then nothing else is split.
      version: Version of the rule, `LATEST` or `NO_MARKS`. That of a vocabulary must not change.
    """

    lower_case: bool = True
    is_tokenized: bool = False
    version: int = LATEST

    def words(self, text: str) -> list[str]:
        """Returns the words of one text, in order."""
        text = text.replace(_NUL, _REPLACEMENT)
        if text.isascii():  # It has no marks. Shorter expressions take half the time.
            word = _word(NO_MARKS)
        else:
            text = normalised(text, self.version)
            word = _word(self.version, max(text) < "\U00010000")
        if self.lower_case:
            text = text.lower()
        return text.split() if self.is_tokenized else word.findall(text)

    @property
    def is_in_graphs(self) -> bool:
        """True: `split` can build a graph."""
        return True

    @property
    def pattern(self) -> str:
        """Regular expression of a word, lower-cased or not, in the syntax of RE2."""
        if self.is_tokenized:
            return rf"[^{_RE2_SPACES}]+"
        marks = rf"[{_JOINERS}\p{{M}}]" if self.version > NO_MARKS else None
        return _pattern(_RE2_LETTER, _RE2_DIGIT, rf"[^{_RE2_SPACES}]", marks)

    def split(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the words of each text, as a graph; the same as from `words`.

        `texts` are normalised to NFC, UTF-8, shape [n]. The words have the ragged shape [n, None].
        """
        import tensorflow as tf

        texts = tf.strings.regex_replace(texts, r"\x00", _REPLACEMENT)
        if self.lower_case:
            texts = _lower(texts)
        # No word has white space in it, and nothing but white space is left between words.
        spaced = tf.strings.regex_replace(texts, rf"({self.pattern})|[{_RE2_SPACES}]+", "\\1\n")
        return tf.strings.split(spaced)


def _lower(texts: tf.Tensor) -> tf.Tensor:
    """Lower-cases like `str.lower`.

    `tf.strings.lower` follows the locale of the process (Turkish: "I" becomes "ı") and an
    older Unicode. So it only handles what depends on the letters around: the final sigma.
    """
    import tensorflow as tf

    capitals, small = _capitals()
    texts = tf.strings.regex_replace(texts, _DOTTED_I, _DOTTED_I.lower())  # Two characters.
    codes = tf.strings.unicode_decode(texts, "UTF-8")
    place = tf.minimum(tf.searchsorted(capitals, codes.flat_values), len(capitals) - 1)
    is_capital = tf.equal(tf.gather(capitals, place), codes.flat_values)
    codes = codes.with_flat_values(tf.where(is_capital, tf.gather(small, place), codes.flat_values))
    return tf.strings.lower(tf.strings.unicode_encode(codes, "UTF-8"), encoding="utf-8")


def count_unspaced(text: str) -> int:
    """Counts the characters of scripts without spaces between words."""
    return 0 if text.isascii() else len(_UNSPACED.findall(text))


def is_unspaced(texts: Iterable[str]) -> bool:
    """Returns whether many characters of texts are of scripts without spaces between words."""
    unspaced = length = 0
    for text in texts:
        unspaced, length = unspaced + count_unspaced(text), length + len(text)
    return unspaced > _MANY_UNSPACED * length


@functools.cache
def _capitals() -> tuple[np.ndarray, np.ndarray]:
    """Returns capitals with a small form of one character, and that form; int32, ascending."""
    pairs = [
        (code, ord(chr(code).lower()))
        for code in range(sys.maxunicode + 1)
        if chr(code) not in (_SIGMA, _DOTTED_I) and chr(code).lower() != chr(code)
    ]
    return tuple(np.array(pairs, np.int32).T)
