"""Splits of a corpus by user."""

from __future__ import annotations

import dataclasses
import hashlib

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


def is_held_out(user_id: str) -> bool:
    """Returns whether `by_user` holds a user out for validation."""
    return hash_bucket(user_id) == 1


def by_user(corpus: user_text.UserText) -> UserSplit:
    """Splits by user: bucket 0 is test, 1 is validation, the others train.

    The parts have about 10, 10 and 80 % of the users, in the corpus's order. A part of a small
    corpus may be empty.
    """
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for user_id in corpus.user_ids:
        parts[min(hash_bucket(user_id), 2)].append(user_id)
    test, validation, train = (corpus.select(part) for part in parts)
    return UserSplit(train, validation, test)
