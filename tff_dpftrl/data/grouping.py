"""Rows of users and texts, grouped by user: in memory, or in a file if they are many.

The file is an SQLite database. Rows are appended as they come, and an index by user is built at
the end by SQLite's external sort: memory stays flat in the number of texts, the sort's temporary
files hold numbers only, and one user's texts are read without the others'. An Arrow file would have
to be sorted with all texts in memory or in temporary files, and has no place for later facts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sqlite3
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.data import user_text

Group: TypeAlias = tuple[str, Sequence[str]]
"""A user and some of that user's texts, perhaps none."""

_FORMAT = 1
_IN_MEMORY = 2**26  # Bytes of users and texts, about. More of them go to a file.
_PER_TEXT = 64  # Bytes of a text in memory besides its characters, about.
_PER_USER = 256  # Bytes of a user in memory, about.
_TABLES = """
    CREATE TABLE about (name TEXT PRIMARY KEY, value);
    CREATE TABLE users (number INTEGER PRIMARY KEY, id BLOB NOT NULL);
    CREATE TABLE texts (number INTEGER PRIMARY KEY, user INTEGER, digest INTEGER, text BLOB);
    CREATE TABLE kept (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
_INDICES = """
    CREATE UNIQUE INDEX by_id ON users (id);
    CREATE INDEX by_user ON texts (user, digest);
"""
_TEXTS = """
    SELECT text FROM texts WHERE user = (SELECT number FROM users WHERE id = ?) ORDER BY number
"""
_REPEATED = """
    SELECT coalesce(sum(n - 1), 0) FROM (SELECT count(*) AS n FROM texts GROUP BY user, digest)
"""


@dataclasses.dataclass(frozen=True)
class Cache:
    """A place for the file of a large corpus.

    Attributes:
      path: The file; a temporary one, which goes with the process, if None.
    """

    path: pathlib.Path | None = None

    def read(self, name: str, fingerprint: str, is_tokenized: bool) -> user_text.UserText | None:
        """Returns the corpus in the file; None if it is missing, damaged or of something else."""
        if self.path is None or not self.path.is_file():
            return None
        reader = _Reader(self.path)
        with contextlib.suppress(sqlite3.Error):
            about = reader.about()
            if (about.get("format"), about.get("fingerprint")) == (_FORMAT, fingerprint):
                return reader.corpus(name, about["user_unit"], is_tokenized)
        return None


TEMPORARY = Cache()
"""A place that goes with the process."""


def group(
    name: str,
    groups: Iterable[Group],
    *,
    user_unit: str,
    is_tokenized: bool,
    finish: Callable[[int, int], None] = lambda num_repeated, num_users: None,
    cache: Cache = TEMPORARY,
    fingerprint: str = "",
    co_owners: Mapping[str, Collection[str]] = types.MappingProxyType({}),
) -> user_text.UserText:
    """Groups texts by user, users and texts in the order of `groups`, which are read once.

    `finish` is called with the number of texts that repeat an earlier one of the same user, and the
    number of users. What it raises ends the grouping, and no file is kept. `co_owners` may be
    filled while `groups` are read.
    """
    examples_by_user: dict[str, list[str]] = {}
    size, rest = 0, iter(groups)
    for user, texts in rest:
        examples = examples_by_user.get(user)
        if examples is None:
            examples = examples_by_user[user] = []
            size += _PER_USER
        examples.extend(texts)
        size += sum(map(len, texts)) + _PER_TEXT * len(texts)
        if size > _IN_MEMORY:
            about = {"format": _FORMAT, "fingerprint": fingerprint, "user_unit": user_unit}
            reader = _Reader.temporary() if cache.path is None else _Reader(cache.path)
            _write(reader.path, _both(examples_by_user, rest), about, finish, co_owners)
            return reader.corpus(name, user_unit, is_tokenized)
    finish(
        sum(len(texts) - len(set(texts)) for texts in examples_by_user.values()),
        len(examples_by_user),
    )
    corpus = user_text.UserText.from_mapping(
        name, examples_by_user, user_unit=user_unit, is_tokenized=is_tokenized
    )
    return dataclasses.replace(corpus, co_owners=co_owners)


def _both(first: dict[str, list[str]], rest: Iterable[Group]) -> Iterator[Group]:
    """Yields the groups in memory, frees them, and yields the rest."""
    yield from first.items()
    first.clear()
    yield from rest


def _write(
    path: pathlib.Path,
    groups: Iterable[Group],
    about: dict[str, Any],
    finish: Callable[[int, int], None],
    co_owners: Mapping[str, Collection[str]],
) -> None:
    """Writes the file whole or not at all. What a killed process left, the run removes."""
    numbers: dict[str, int] = {}

    def records() -> Iterator[tuple[int, int, bytes]]:
        for user, texts in groups:
            number = numbers.setdefault(user, len(numbers))
            for text in texts:
                yield number, hash(text), _encode(text)

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file first: the journal of a killed `remember` would be applied to what replaces it.
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
    with durable_files.replacing(path, private=True) as file:
        with contextlib.closing(sqlite3.connect(file.name, isolation_level=None)) as database:
            # A file that is not finished is thrown away: it needs no journal.
            database.executescript(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"
                f"{_TABLES} BEGIN"
            )
            database.executemany(
                "INSERT INTO texts (user, digest, text) VALUES (?, ?, ?)", records()
            )
            database.executemany(
                "INSERT INTO users VALUES (?, ?)",
                ((number, _encode(user)) for user, number in numbers.items()),
            )
            about = about | {"co_owners": json.dumps({k: [*v] for k, v in co_owners.items() if v})}
            database.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            database.execute("COMMIT")
            database.executescript(_INDICES)
            ((num_repeated,),) = database.execute(_REPEATED)
            finish(num_repeated, len(numbers))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Reader:
    """A reader of a file, which may be used by several threads and copied to other processes."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._local = threading.local()

    @classmethod
    def temporary(cls) -> _Reader:
        """Returns the reader of a file to be written, which is removed with the reader."""
        folder = tempfile.mkdtemp(prefix="tff_dpftrl_")
        reader = cls(pathlib.Path(folder, "texts.sqlite"))
        weakref.finalize(reader, _remove, folder, os.getpid())
        return reader

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reader, (self.path,)

    def _execute(self, query: str, *values: Any) -> list[Any]:
        # A connection must not be used by another thread, nor by a process forked since.
        if getattr(self._local, "process", None) != os.getpid():
            uri = f"{self.path.resolve().as_uri()}?mode=ro"
            self._local.connection = sqlite3.connect(uri, uri=True)
            self._local.process = os.getpid()
        return self._local.connection.execute(query, values).fetchall()

    def about(self) -> dict[str, Any]:
        """Returns what `group` wrote about the corpus."""
        return dict(self._execute("SELECT name, value FROM about"))

    def corpus(self, name: str, user_unit: str, is_tokenized: bool) -> user_text.UserText:
        """Returns the corpus, which reads its texts from the file."""
        ids = self._execute("SELECT id FROM users ORDER BY number")
        return user_text.UserText(
            name,
            user_unit,
            tuple(user_id.decode("utf-8", "surrogatepass") for (user_id,) in ids),
            self.examples,
            is_tokenized,
            self.remember,
            json_text.parse(self.about().get("co_owners", "{}")),
        )

    def examples(self, user_id: str) -> list[str]:
        """Returns the texts of one user."""
        try:
            rows = self._execute(_TEXTS, _encode(user_id))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise validation.UsageError(
                f"{self.path} cannot be read: {error}. Remove it, and it is made again."
            ) from error
        return [text.decode("utf-8", "surrogatepass") for (text,) in rows]

    def remember(self, name: str, compute: Callable[[], bytes]) -> bytes:
        """Returns a value that depends on the texts, computed at the first time only."""
        rows = self._execute("SELECT value FROM kept WHERE name = ?", name)
        if rows:
            return rows[0][0]
        value = compute()
        # Where the file may only be read, it is computed each time.
        with contextlib.suppress(sqlite3.Error):
            with contextlib.closing(sqlite3.connect(self.path)) as database, database:
                database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, value))
        return value


def _remove(folder: str, process: int) -> None:
    if process == os.getpid():  # Not in one that was forked.
        shutil.rmtree(folder, ignore_errors=True)
