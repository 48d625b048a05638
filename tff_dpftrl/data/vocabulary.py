"""Words and their ids, made from text that nobody's privacy depends on.

A vocabulary counted on the users being protected would itself be a release without
noise. So it comes from public text, and says where from: `source` and `is_public`
are for the privacy statement.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Sequence

from tff_dpftrl.data import docstrings, jsonl, tokenizer, user_text

PAD = 0
"""Id that fills sequences up, as in TFF's Stack Overflow word prediction."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words in a fixed order, and the ids of words and special tokens.

    Ids are those of TFF's Stack Overflow word prediction with one
    out-of-vocabulary bucket (tensorflow_federated/python/simulation/baselines/
    stackoverflow/word_prediction_preprocessing.py): 0 is padding, words have ids 1
    to n, then come out-of-vocabulary, beginning and end of sequence.

    Attributes:
      words: Distinct words, most frequent first where it was counted.
      source: Where the words are from, for the privacy statement.
      is_public: False if the words were counted on users who are to be protected.
      lower_case: Whether the words are lower-cased, and texts must be.
    """

    words: tuple[str, ...] = dataclasses.field(repr=False)
    source: str
    is_public: bool
    lower_case: bool = True

    def __post_init__(self):
        if not self.words:
            raise ValueError(f"words of the vocabulary from {self.source} must not be empty.")
        if len(set(self.words)) != len(self.words):
            raise ValueError(f"words of the vocabulary from {self.source} must be distinct.")

    @property
    def size(self) -> int:
        """Number of ids: the words and four special tokens."""
        return len(self.words) + 4

    @property
    def oov(self) -> int:
        """Id of every word that is not in the vocabulary."""
        return len(self.words) + 1

    @property
    def bos(self) -> int:
        """Id of the beginning of a sequence."""
        return len(self.words) + 2

    @property
    def eos(self) -> int:
        """Id of the end of a sequence."""
        return len(self.words) + 3

    @functools.cached_property
    def id_of(self) -> dict[str, int]:
        """Ids by word."""
        return {word: index for index, word in enumerate(self.words, start=1)}

    def ids(self, words: Sequence[str]) -> list[int]:
        """Returns the ids of words, `oov` for unknown ones."""
        id_of, oov = self.id_of, self.oov
        return [id_of.get(word, oov) for word in words]


def most_frequent(
    corpus: user_text.UserText, size: int, *, is_public: bool, lower_case: bool = True
) -> Vocabulary:
    """Returns the most frequent words of a corpus.

    Args:
      corpus: The corpus to count.
      size: Largest number of words.
      is_public: Whether the corpus is public text. Pass False if its users, or
        some of them, are the ones to protect.
      lower_case: Whether to lower-case.

    Returns:
      The words by falling count, ties in alphabetical order; fewer than `size` if
      the corpus has no more.

    Raises:
      ValueError: If `size` is not positive or the corpus has no words.
    """
    _check_size(size)
    rule = tokenizer.Tokenizer(lower_case=lower_case, is_tokenized=corpus.is_tokenized)
    counts: collections.Counter[str] = collections.Counter()
    for text in corpus.texts():
        counts.update(rule.words(text))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = tuple(word for word, _ in ranked[:size])
    kind = "public corpus" if is_public else "protected corpus"
    return Vocabulary(words, f"{kind} {corpus.name}", is_public, lower_case)


def standard_library(
    size: int,
    *,
    lower_case: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Vocabulary:
    """Returns the most frequent words of the standard library's docstrings.

    Args:
      size: Largest number of words; there are about 9,000.
      lower_case: Whether to lower-case.
      cache_dir: As in `docstrings.read`.

    Returns:
      A public vocabulary.

    Raises:
      ValueError: If `size` is not positive.
    """
    corpus = docstrings.read_standard_library(cache_dir=cache_dir)
    found = most_frequent(corpus, size, is_public=True, lower_case=lower_case)
    return dataclasses.replace(found, source="docstrings of Python's standard library")


def from_file(
    path: str | os.PathLike[str], size: int | None = None, *, lower_case: bool = True
) -> Vocabulary:
    """Returns a vocabulary from a public file that the user names.

    Args:
      path: A corpus to count, if it ends in `.jsonl` or `.jsonl.gz`; otherwise a
        text file, UTF-8, with one word a line, best first. There, words that equal
        an earlier one after lower-casing, and what stands after the first white
        space of a line (such as a count), are ignored.
      size: Largest number of words; must be given for a corpus.
      lower_case: Whether to lower-case.

    Returns:
      A vocabulary marked public: whoever names the file vouches for it.

    Raises:
      ValueError: If the file cannot be read or has no words, or `size` is not
        positive or is missing.
    """
    path = pathlib.Path(path)
    if size is not None:
        _check_size(size)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        if size is None:
            raise ValueError(f"size must be given to count the words of the corpus {path}.")
        return most_frequent(jsonl.read(path), size, is_public=True, lower_case=lower_case)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the vocabulary cannot be read: {error}.") from error
    words = _first_words(lines, lower_case)
    if not words:
        raise ValueError(f"{path}: the vocabulary has no words; write one a line.")
    return Vocabulary(tuple(words[:size]), f"public word list {path}", True, lower_case)


def _first_words(lines: Iterable[str], lower_case: bool) -> list[str]:
    firsts = (line.split()[0] for line in lines if line.strip())
    return list(dict.fromkeys(word.lower() if lower_case else word for word in firsts))


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size of the vocabulary must be at least 1, got {size!r}.")
