"""Corpora in JSON lines: one line a user, `{"user_id": ..., "examples": [...]}`."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.data import grouping, table_files, tables, user_ids, user_text


def read(
    path: str | os.PathLike[str],
    *,
    is_tokenized: bool = False,
    cache: grouping.Cache = grouping.TEMPORARY,
    fingerprint: str = "",
) -> user_text.UserText:
    """Reads a corpus from a JSONL file, gzip-compressed if it ends in `.gz`.

    Each line is an object with the keys `user_id`, a string, and `examples`, a
    list of strings; other keys are ignored, and so are blank lines.

    Args:
      path: File to read, UTF-8.
      is_tokenized: Whether texts are words separated by white space already.
      cache: Place for texts that are too large for memory.
      fingerprint: Fingerprint of the file, by which `cache` is found to be of it.

    Returns:
      The corpus, users in the file's order.

    Raises:
      ValueError: If the file is missing or unreadable, a line is not as
        described (the message has file and line number), a user comes twice, or
        there are fewer than two users.
    """
    path = pathlib.Path(path)
    corpus = grouping.group(
        str(path),
        _groups(path),
        user_unit="one user_id, that is one line of the file",
        is_tokenized=is_tokenized,
        cache=cache,
        fingerprint=fingerprint,
    )
    return user_text.require_several_users(corpus)


def _groups(path: pathlib.Path) -> Iterator[grouping.Group]:
    line_of_user: dict[str, int] = {}
    number = 0
    try:
        with table_files.open_bytes(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                user_id, examples = _parse_line(line, f"{path}:{number}")
                if user_id in line_of_user:
                    raise validation.UsageError(
                        f"{path}:{number}: user_id {user_id!r} was already on line "
                        f"{line_of_user[user_id]}; put all examples of a user on one line."
                    )
                line_of_user[user_id] = number
                yield user_id, examples
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        where = f"{path}, after line {number}" if number else str(path)
        raise validation.UsageError(f"{where}: cannot be read: {reason}.") from error


def write(corpus: user_text.UserText, path: str | os.PathLike[str]) -> None:
    """Writes a corpus in the format that `read` reads, whole or not at all.

    Args:
      corpus: Corpus, of which only ids and texts are kept.
      path: File to write, gzip-compressed if it ends in `.gz`; replaced if it exists.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_files.replacing(path) as file, contextlib.ExitStack() as stack:
        stream = file
        if path.suffix == ".gz":
            stream = stack.enter_context(gzip.GzipFile("", "wb", 4, file, mtime=0))
        for user_id in corpus.user_ids:
            row = {"user_id": user_id, "examples": corpus.examples(user_id)}
            stream.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")


def _parse_line(line: bytes, where: str) -> tuple[str, list[str]]:
    try:
        row: Any = json_text.parse(line)
    except UnicodeDecodeError as error:
        raise validation.UsageError(f"{where}: not UTF-8: {error}.") from error
    except ValueError as error:
        raise validation.UsageError(f"{where}: not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise validation.UsageError(
            f'{where}: must be an object {{"user_id": ..., "examples": [...]}}, got '
            f"{type(row).__name__}."
        )
    user_id = row.get("user_id")
    if not isinstance(user_id, str):
        raise validation.UsageError(f"{where}: user_id must be a string, got {user_id!r}.")
    examples = row.get("examples")
    if not isinstance(examples, list) or not all(isinstance(text, str) for text in examples):
        raise validation.UsageError(
            f"{where}: examples must be a list of strings, got {str(examples)[:60]!r}."
        )
    try:
        user_id = user_ids.as_text(user_id)
        reason = next(filter(None, map(tables.damage, examples)), None)
    except user_ids.NoId as error:
        reason = str(error)
    if reason is not None:
        raise validation.UsageError(f"{where}: is a line {reason}.")
    return user_id, examples
