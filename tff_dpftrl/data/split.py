"""Splits of a corpus: by user, or the texts of each user in two."""

from __future__ import annotations

import dataclasses
import hashlib
import math

from tff_dpftrl import validation
from tff_dpftrl.data import user_text


@dataclasses.dataclass(frozen=True)
class UserSplit:
    """Disjoint sets of users.

    Attributes:
      train: Users to train on.
      validation: Users to tune on.
      test: Users to report on.
    """

    train: user_text.UserText
    validation: user_text.UserText
    test: user_text.UserText


def hash_bucket(user_id: str) -> int:
    """Returns `int(sha256(user_id), 16) % 10`, the same on every machine."""
    return int(hashlib.sha256(user_id.encode("utf-8")).hexdigest(), 16) % 10


def by_user(corpus: user_text.UserText) -> UserSplit:
    """Splits by user: bucket 0 is test, 1 is validation, the others train.

    Args:
      corpus: Corpus to split.

    Returns:
      The three parts, about 80, 10 and 10 % of the users, in the corpus's order.
      A small corpus may leave a part empty.
    """
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for user_id in corpus.user_ids:
        parts[min(hash_bucket(user_id), 2)].append(user_id)
    test, validation, train = (corpus.select(part) for part in parts)
    return UserSplit(train, validation, test)


def within_users(
    corpus: user_text.UserText, train_fraction: float = 0.8
) -> tuple[user_text.UserText, user_text.UserText]:
    """Splits each user's texts in two, the earlier ones first.

    It is for personalisation. A user with n texts keeps ceil(train_fraction · n) of
    them for training, so a single text is never a test text.

    Args:
      corpus: Corpus to split.
      train_fraction: Share of each user's texts in the first part, in (0, 1).

    Returns:
      Two corpora with the same users: the first texts of each, and the last.

    Raises:
      ValueError: If `train_fraction` is not in (0, 1).
    """
    validation.number("train_fraction", train_fraction, above=0, below=1)

    def first(user_id: str) -> list[str]:
        texts = list(corpus.read_examples(user_id))
        return texts[: _train_count(len(texts))]

    def last(user_id: str) -> list[str]:
        texts = list(corpus.read_examples(user_id))
        return texts[_train_count(len(texts)) :]

    def _train_count(count: int) -> int:
        # Rounding first keeps 0.8 * 5 from becoming 5 of 5 by a float's last bit.
        return math.ceil(round(train_fraction * count, 9))

    return (
        dataclasses.replace(corpus, read_examples=first),
        dataclasses.replace(corpus, read_examples=last),
    )
