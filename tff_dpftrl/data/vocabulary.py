"""Vocabularies: words and their ids, counted on text that is public.

A vocabulary counted on the users being protected would itself be a release without
noise. So it comes from other text, or is counted with noise (`set_union`). Nothing here can check
that other text is public: a file is public because the operator declares it, and the attribute
`source` records this for the privacy statement. A file that has users of the protected corpus is
refused.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, sources, table_files, tokenizer, user_text

if TYPE_CHECKING:
    import tensorflow as tf

PAD = 0
"""Id of padding, as in TFF's Stack Overflow word prediction."""

DEFAULT_SIZE = 4000
"""Number of words of a vocabulary whose size is not given."""

DP = "dp"
"""Source that stands for words of protected users, counted with noise (`set_union`)."""

NO_BASE = "none"
"""Public words that these are added to, if there are none."""

COUNTS = "counts.csv"
"""Name of the file of a task that counted, in its report."""

COUNTED_WORDS = "words"
"""Histogram of words in such a file."""

OTHER_WORDS = "(other words)"
"""Its bucket of words that are not in the list."""

ENGLISH = "frequent words of English (wordfreq 3.1.1, Speer 2022, CC BY-SA 4.0)"
"""Source of the vocabulary of `english`, for the privacy statement."""

_ENGLISH_FILE = pathlib.Path(__file__).with_name("english_words.txt")
_COUNTS_HEADER = "histogram,bucket,estimate,standard_error,share"
_SIZE = "size of the vocabulary"
_DECLARED = "declared public by the operator"


class Rule(Protocol):
    """A rule from texts to words or sub-words: a `tokenizer.Tokenizer` or one of `subwords`."""

    @property
    def lower_case(self) -> bool:
        """Whether text is lower-cased."""
        ...

    @property
    def is_tokenized(self) -> bool:
        """Whether texts are words separated by white space already."""
        ...

    @property
    def is_in_graphs(self) -> bool:
        """Whether `split` can build a graph."""
        ...

    def words(self, text: str) -> list[str]:
        """Returns the words or sub-words of one text, in order."""
        ...

    def split(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the words or sub-words of each text, as a graph."""
        ...


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary: words in a fixed order, and the ids of words and special tokens.

    Ids are those of TFF's Stack Overflow word prediction with one
    out-of-vocabulary bucket (tensorflow_federated/python/simulation/baselines/
    stackoverflow/word_prediction_preprocessing.py): 0 is padding, words have ids 1
    to n, then come out-of-vocabulary, beginning and end of sequence.

    Attributes:
      words: Distinct words, most frequent first if they were counted.
      source: Source of the words, and who declared it public, for the privacy statement.
      lower_case: Whether the words are lower-cased, and texts must be.
      is_public: Whether the words are independent of the users to be protected.
      is_noised: Whether words that are not public were counted with noise, within the budget of
        the run that counted them.
      word_rule: Version of the rule that splits texts into words: `Tokenizer.version`.
    """

    words: tuple[str, ...] = dataclasses.field(repr=False)
    source: str
    lower_case: bool = True
    is_public: bool = True
    is_noised: bool = False
    word_rule: int = dataclasses.field(default=tokenizer.LATEST, kw_only=True)

    def __post_init__(self):
        if not self.words:
            raise validation.UsageError(
                f"words of the vocabulary from {self.source} must not be empty."
            )
        if len(set(self.words)) != len(self.words):
            raise validation.UsageError(
                f"words of the vocabulary from {self.source} must be distinct."
            )

    @property
    def identity(self) -> tuple[str, ...]:
        """Words, and the rule if it is a later one: both stay the same while a run lasts."""
        rule = () if self.word_rule == tokenizer.NO_MARKS else (f"rule {self.word_rule}",)
        return (*self.words, *rule)

    @property
    def size(self) -> int:
        """Number of ids: the words and four special tokens."""
        return len(self.words) + 4

    @property
    def oov(self) -> int | None:
        """Id of every word that is not in the vocabulary; None if there can be none."""
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
        return list(map(self.id_of.get, words, itertools.repeat(len(self.words) + 1)))

    def rule(self, is_tokenized: bool = False) -> Rule:
        """Returns the rule from texts to what `ids` takes."""
        return tokenizer.Tokenizer(self.lower_case, is_tokenized, self.word_rule)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special ones left out."""
        return " ".join(self.words[i - 1] for i in ids if 0 < i <= len(self.words))

    def shown(self, index: int) -> str:
        """Returns the word of an id as a user reads it."""
        return self.words[index - 1]

    @property
    def unit(self) -> str:
        """Name of what the ids stand for, in the plural."""
        return "words"

    @property
    def may_be_fewer(self) -> bool:
        """Whether a model may have more ids than the vocabulary; no text has those."""
        return False

    def count(self, ids: np.ndarray) -> tuple[int, int]:
        """Returns the number of words in an array of ids, and how many of them are unknown."""
        is_word = ~np.isin(ids, [PAD, self.bos, self.eos])
        unknown = 0 if self.oov is None else int(np.count_nonzero(ids == self.oov))
        return int(np.count_nonzero(is_word)), unknown


def most_frequent(
    corpus: user_text.UserText, size: int, *, source: str, lower_case: bool = True
) -> Vocabulary:
    """Returns the most frequent words of a corpus."""
    validation.integer(_SIZE, size, minimum=1)
    rule = tokenizer.Tokenizer(lower_case=lower_case, is_tokenized=corpus.is_tokenized)
    counts: collections.Counter[str] = collections.Counter()
    for text in corpus.texts():
        counts.update(rule.words(text))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = tuple(word for word, _ in ranked[:size])
    return Vocabulary(words, source, lower_case)


class Make(Protocol):
    """A way to make a vocabulary of a corpus: `most_frequent`, or learning sub-words."""

    def __call__(
        self, corpus: user_text.UserText, size: int, *, source: str, lower_case: bool = True
    ) -> Vocabulary:
        """Makes the vocabulary."""
        ...


def of_training_users(
    corpus: user_text.UserText, size: int, *, lower_case: bool = True, make: Make = most_frequent
) -> Vocabulary:
    """Returns the most frequent words of the users to protect, which gives them away."""
    name = pathlib.PurePath(corpus.name).name
    source = f"counted without noise on the training users of {name}, so NOT covered"
    counted = make(corpus, size, source=source, lower_case=lower_case)
    return dataclasses.replace(counted, is_public=False)


def standard_library(
    size: int,
    *,
    lower_case: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    make: Make = most_frequent,
) -> Vocabulary:
    """Returns the most frequent of about 9,000 words of the standard library's docstrings."""
    corpus = docstrings.read_standard_library(cache_dir=cache_dir)
    source = "docstrings of Python's standard library"
    return make(corpus, size, source=source, lower_case=lower_case)


def english(size: int, *, lower_case: bool = True) -> Vocabulary:
    """Returns the most frequent words of ordinary English, from a list of 20,000 in this package.

    The words are those of the package wordfreq, under CC BY-SA 4.0; the head of `english_words.txt`
    has the details.
    """
    validation.integer(_SIZE, size, minimum=1)
    if not lower_case:
        raise validation.UsageError(
            "lower_case must be true with the vocabulary 'english', whose words are in lower case: "
            "take the vocabulary 'docs' or a file of public text to keep capitals."
        )
    lines = _ENGLISH_FILE.read_text(encoding="utf-8").splitlines()
    words = [line for line in lines if line == "#" or not line.startswith("#")]
    return Vocabulary(tuple(words[:size]), ENGLISH)


def from_file(
    path: str | os.PathLike[str],
    size: int | None = None,
    *,
    lower_case: bool = True,
    is_tokenized: bool = False,
    protected: user_text.UserText | None = None,
    make: Make = most_frequent,
) -> Vocabulary:
    """Returns a vocabulary from a file, which the caller thereby declares public.

    The file is a table or JSON lines to count (`sources.load_user_text`); or a text file, UTF-8,
    with one word a line, best first. In a text file, words that equal an earlier one after
    lower-casing are ignored, and so is the rest of a line after its first white space (such as a
    count). A corpus needs `size`, and is refused if it has users of `protected`: one of their texts
    under their id, or all of their texts, 20 words or more, under any. A word list cannot be
    checked.
    """
    path = pathlib.Path(path)
    if size is not None:
        validation.integer(_SIZE, size, minimum=1)
    if table_files.find(str(path)):
        if size is None:
            raise validation.UsageError(
                f"size must be given to count the words of the corpus {path}."
            )
        corpus = sources.load_user_text(str(path), pretokenized=is_tokenized)
        if protected is not None and (shared := user_text.shared_users(corpus, protected)):
            raise validation.UsageError(
                f"vocabulary {path} cannot be public: it has the texts of {shared} of the "
                f"{len(protected)} users of {protected.name} who are to be protected; count it on "
                "other text, or pass vocabulary='private', and the statement will say that it is "
                "not covered."
            )
        return make(
            corpus, size, source=f"counted on {path.name}, {_DECLARED}", lower_case=lower_case
        )
    if make is not most_frequent:
        raise validation.UsageError(
            f"vocabulary {path} is a list of words, and sub-words are learned on text: name a "
            "corpus of public text, as for --data, or take tokenizer 'words'."
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise validation.UsageError(f"{path}: the vocabulary cannot be read: {error}.") from error
    words = _first_words(lines, lower_case)
    if not words:
        raise validation.UsageError(f"{path}: the vocabulary has no words; write one a line.")
    return Vocabulary(tuple(words[:size]), f"word list {path.name}, {_DECLARED}", lower_case)


def is_of_counts(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is the `counts.csv` of a task that counted words."""
    path = pathlib.Path(path)
    if path.name != COUNTS or not path.is_file():
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.readline().strip() == _COUNTS_HEADER


def from_counts(path: str | os.PathLike[str], size: int, *, lower_case: bool = True) -> Vocabulary:
    """Returns the most frequent words of a task that counted words of a public list, with noise.

    First come words whose estimate is above twice its standard error, by falling estimate. Noise
    would choose among the others, so they follow in the order of the public list.
    """
    validation.integer(_SIZE, size, minimum=1)
    path, seen = pathlib.Path(path), []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                if row["histogram"] == COUNTED_WORDS and row["bucket"] != OTHER_WORDS:
                    estimate = float(row["estimate"])
                    is_sure = estimate > 2.0 * float(row["standard_error"] or 0.0)
                    seen.append((-estimate if is_sure else 0.0, row["bucket"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise validation.UsageError(f"{path}: the counts cannot be read: {error!r}.") from error
    if not seen:
        raise validation.UsageError(
            f"{path} has no counts of words: name that of a task with --analytics words."
        )
    sure = sorted(one for one in seen if one[0] < 0.0)
    words = [word for _, word in (*sure, *(one for one in seen if one[0] == 0.0))]
    if lower_case and any(word != word.lower() for word in words):
        raise validation.UsageError(
            f"lower_case must be false with {path}, whose words have capitals; got true."
        )
    source = f"words of a public list, chosen by counts with noise ({path.name} of a task)"
    return Vocabulary(tuple(words[:size]), source, lower_case, is_public=False, is_noised=True)


def _first_words(lines: Iterable[str], lower_case: bool) -> list[str]:
    firsts = (tokenizer.normalised(line).split()[0] for line in lines if line.strip())
    return list(dict.fromkeys(word.lower() if lower_case else word for word in firsts))
