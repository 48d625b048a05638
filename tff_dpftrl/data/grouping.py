"""Rows of users and texts, grouped by user."""

from __future__ import annotations

from collections.abc import Iterable

from tff_dpftrl.data import user_text


def group(
    name: str, rows: Iterable[tuple[str, str]], *, user_unit: str, is_tokenized: bool
) -> tuple[user_text.UserText, int]:
    """Groups rows by user.

    Args:
      name: Name of the corpus in messages and statements.
      rows: Users and texts; they are read once.
      user_unit: Description of one user, in words.
      is_tokenized: Whether texts are words separated by white space already.

    Returns:
      The corpus, users and the texts of each in the order of the rows; and the number of rows
      that repeat an earlier one.
    """
    examples_by_user: dict[str, list[str]] = {}
    for user, text in rows:
        examples_by_user.setdefault(user, []).append(text)
    num_repeated = sum(len(texts) - len(set(texts)) for texts in examples_by_user.values())
    corpus = user_text.UserText.from_mapping(
        name, examples_by_user, user_unit=user_unit, is_tokenized=is_tokenized
    )
    return corpus, num_repeated
