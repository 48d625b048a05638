"""The corpus of a name or path of the command line or a config."""

from __future__ import annotations

import filecmp
import os

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, jsonl, sqlite, user_text

_SQLITE = (".sqlite", ".sqlite3", ".db")


def load_user_text(
    spec: str,
    *,
    pretokenized: bool = False,
    sqlite_text_feature: str = "tokens",
    sqlite_split: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: docstrings.Progress | None = None,
) -> user_text.UserText:
    """Returns the corpus that `spec` names.

    Args:
      spec: Name "docs" for the docstrings of the installed packages, or a path that
        ends in `.jsonl`, `.jsonl.gz` or `.sqlite`.
      pretokenized: Whether the texts of a file are words separated by white space.
      sqlite_text_feature: Name of the text feature of an example in SQLite.
      sqlite_split: Split of SQLite to read; all of them if None.
      cache_dir: Folder in which "docs" is cached; `docstrings.read` has the default.
      progress: Callback for the number of files read for "docs", and of all files.

    Returns:
      The corpus; it has at least two users.

    Raises:
      ValueError: If there is no such corpus, it cannot be read, or an option does
        not apply to it.
    """
    if not spec.endswith(_SQLITE):
        for name, given in (
            ("sqlite_text_feature", sqlite_text_feature != "tokens"),
            ("sqlite_split", sqlite_split is not None),
        ):
            if given:
                raise validation.UsageError(
                    f"{name} applies to SQLite files only, not to {spec!r}."
                )
    if spec == "docs":
        if pretokenized:
            raise validation.UsageError(
                "pretokenized applies to files only; 'docs' is prose: leave it out."
            )
        return docstrings.read(cache_dir=cache_dir, progress=progress)
    if spec.endswith((".jsonl", ".jsonl.gz")):
        return jsonl.read(spec, is_tokenized=pretokenized)
    if spec.endswith(_SQLITE):
        return sqlite.read(
            spec,
            split_name=sqlite_split,
            text_feature=sqlite_text_feature,
            is_tokenized=pretokenized,
        )
    raise validation.UsageError(
        f"data must be 'docs' or a path ending in .jsonl, .jsonl.gz or .sqlite, got {spec!r}."
    )


def are_same_file(one: str, other: str) -> bool:
    """Returns whether two corpora are the same by name, or as a file and its copy."""
    if one == other:
        return True
    return os.path.isfile(one) and os.path.isfile(other) and filecmp.cmp(one, other, shallow=False)


def share_texts(one: str, other: str) -> bool:
    """Returns whether two corpora are the same, or users of the second have texts in the first.

    Args:
      one: First name or path; a name of no file is compared by name.
      other: Second name or path.

    Returns:
      Whether they do, by the names, the bytes, or else the texts (`user_text.shared_users`) of
      files that can be read as they are. Texts that were changed are not recognised.
    """
    if are_same_file(one, other):
        return True
    if not (os.path.isfile(one) and os.path.isfile(other)):
        return False
    try:
        corpora = load_user_text(one), load_user_text(other)
    except ValueError:  # Who uses the file says what is wrong with it.
        return False
    return user_text.shared_users(*corpora) > 0
