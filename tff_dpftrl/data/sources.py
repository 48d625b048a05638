"""Finds the reader for what a user calls their data."""

from __future__ import annotations

import os

from tff_dpftrl.data import docstrings, jsonl, sqlite, user_text


def load_user_text(
    spec: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: docstrings.Progress | None = None,
) -> user_text.UserText:
    """Returns the corpus that `spec` names.

    Args:
      spec: "docs" for the docstrings of the installed packages, or a path that
        ends in `.jsonl`, `.jsonl.gz` or `.sqlite`.
      cache_dir: Where "docs" is cached; see `docstrings.read`.
      progress: Told about files read for "docs"; see `docstrings.read`.

    Returns:
      The corpus; it has at least two users.

    Raises:
      ValueError: If there is no such corpus or it cannot be read.
    """
    if spec == "docs":
        return docstrings.read(cache_dir=cache_dir, progress=progress)
    if spec.endswith((".jsonl", ".jsonl.gz")):
        return jsonl.read(spec)
    if spec.endswith((".sqlite", ".sqlite3", ".db")):
        return sqlite.read(spec)
    raise ValueError(
        f"data must be 'docs' or a path ending in .jsonl, .jsonl.gz or .sqlite, got {spec!r}."
    )
