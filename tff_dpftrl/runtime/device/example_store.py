"""Stores of an application's examples for training on its device (paper 004, section 3).

`ExampleStore` is the interface that the runtime needs: serialized examples of a collection,
newest first. `SqliteExampleStore` implements it in a file, for applications without a store. It
deletes examples that are too old or too many.

Deleted examples are gone from the file: their rows are overwritten, and the file is rewritten
without them (`PrivateDatabase.rewrite`). If the process dies between the two, the next writer
rewrites the file. A file system or a flash disk may keep overwritten blocks, and a stolen
device's disk can be read: the platform must prevent both, by encryption at rest.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import private_database

# Approximate overhead of an example in the file, in bytes.
_ROW_BYTES = 80
# Rewriting the file takes time. So examples that expire soon are deleted with expired ones, and
# a full store is emptied by more than it needs to be.
_EXPIRE_EARLY = 1 / 32
_KEEP_WHEN_FULL = 7 / 8
_DAY_S = 24 * 3600.0

_logger = logging.getLogger(__name__)

_KIND = private_database.Kind(
    name="an example store",
    application_id=0x44504558,  # "DPEX"
    version=1,
    tables=f"""CREATE TABLE examples (
  example_id INTEGER PRIMARY KEY,
  collection TEXT NOT NULL,
  recorded REAL NOT NULL,              -- seconds since 1970
  example BLOB NOT NULL
);
CREATE INDEX by_collection ON examples (collection, recorded);
CREATE INDEX by_time ON examples (recorded);
CREATE TABLE state (
  bytes INTEGER NOT NULL,              -- of all examples, as the size cap counts them
  deletions INTEGER NOT NULL,          -- transactions that deleted something
  rewritten INTEGER NOT NULL           -- value of deletions that the file was rewritten after
);
INSERT INTO state VALUES (0, 0, 0);
CREATE TRIGGER example_added AFTER INSERT ON examples BEGIN
  UPDATE state SET bytes = bytes + length(new.example) + {_ROW_BYTES}; END;
CREATE TRIGGER example_deleted AFTER DELETE ON examples BEGIN
  UPDATE state SET bytes = bytes - length(old.example) - {_ROW_BYTES}; END""",
    if_damaged="Remove it: its examples are lost.",
)

_STATE = "SELECT bytes, deletions, rewritten FROM state"


class ExampleStore(abc.ABC):
    """Collections of serialized examples, such as `tf.train.Example` protos."""

    @abc.abstractmethod
    def select(
        self, collection: str, *, max_examples: int, recorded_since: float | None = None
    ) -> list[bytes]:
        """Reads the newest examples of a collection.

        Args:
          collection: Name of the collection.
          max_examples: Largest number of examples, at least 1.
          recorded_since: Earliest time of an example, in seconds since 1970; None for any.

        Returns:
          Serialized examples, newest first; none if there is no such collection.

        Raises:
          ValueError: If an argument is out of range, or the store is damaged.
          OSError: If the store cannot be read.
        """


@dataclasses.dataclass(frozen=True)
class Retention:
    """Retention limits of an example store."""

    # Age in seconds from which an example is no longer read. The next write, the next opening and,
    # once a day, a device that waits (`DailyExpiry`) delete it; they may delete it up to 1/32 of
    # this age earlier.
    max_age_s: float = 30 * 24 * 3600.0
    # Largest size of all examples in bytes, counting 80 bytes of overhead for each. Beyond it the
    # oldest are deleted. The file may be somewhat larger.
    max_bytes: int = 16_000_000

    def __post_init__(self):
        validation.positive("max_age_s", self.max_age_s)
        validation.integer("max_bytes", self.max_bytes, minimum=1)


class SqliteExampleStore(ExampleStore):
    """Example store in one SQLite file, which threads and processes may share."""

    def __init__(
        self,
        database: private_database.PrivateDatabase,
        retention: Retention,
        clock: Callable[[], float],
    ):
        """Internal; use `SqliteExampleStore.open`."""
        self._database = database
        self._retention = retention
        self._clock = clock

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float],
        retention: Retention | None = None,
    ) -> SqliteExampleStore:
        """Opens a store, or creates an empty one; examples that expired are deleted from the file.

        The folder must exist; the file's mode becomes 0600. All writers of a store must have the
        same `retention`. It raises ValueError for a damaged file, or one that is no example store.
        """
        database = private_database.PrivateDatabase.open(path, _KIND)
        store = cls(database, Retention() if retention is None else retention, clock)
        try:
            store.expire()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    @override
    def select(
        self, collection: str, *, max_examples: int, recorded_since: float | None = None
    ) -> list[bytes]:
        """Reads the newest examples of a collection that have not expired."""
        limit = validation.integer("max_examples", max_examples, minimum=1)
        since = self._clock() - self._retention.max_age_s
        if recorded_since is not None:
            since = max(since, validation.number("recorded_since", recorded_since))
        rows = self._database.read(
            "SELECT example FROM examples WHERE collection = ? AND recorded >= ? "
            "ORDER BY recorded DESC, example_id DESC LIMIT ?",
            _checked_collection(collection),
            since,
            min(limit, 2**62),
        )
        examples = [example for (example,) in rows]
        if not all(isinstance(example, bytes) for example in examples):
            raise self._database.damaged("an example is no bytes")
        return examples

    def counts(self) -> dict[str, int]:
        """Counts the examples of each collection, including expired ones."""
        return dict(
            self._database.read("SELECT collection, count(*) FROM examples GROUP BY 1 ORDER BY 1")
        )

    def add(
        self, collection: str, examples: Iterable[bytes], *, recorded: float | None = None
    ) -> None:
        """Adds serialized examples, all or none; the last one counts as the newest.

        `recorded` is their time in seconds since 1970 (default: now; never in the future).
        """
        now = self._clock()
        recorded = now if recorded is None else validation.number("recorded", recorded)
        if recorded > now:
            raise validation.UsageError(f"recorded={recorded} is in the future: it is {now} now.")
        collection = _checked_collection(collection)
        rows = [(collection, recorded, self._checked(example)) for example in examples]
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT INTO examples (collection, recorded, example) VALUES (?, ?, ?)", rows
            )
            self._enforce_retention(connection, now)
        self._try_to_rewrite()

    def expire(self) -> None:
        """Deletes expired examples, as each `add` does; for times in which nothing is added."""
        with self._database.transaction() as connection:
            self._enforce_retention(connection, self._clock())
        self._try_to_rewrite()

    def clear(self, collection: str | None = None) -> None:
        """Deletes a collection, or all of them if None, from the file."""
        with self._database.transaction() as connection:
            if collection is None:
                deleted = connection.execute("DELETE FROM examples")
            else:
                deleted = connection.execute(
                    "DELETE FROM examples WHERE collection = ?", (_checked_collection(collection),)
                )
            _count_deletion(connection, deleted)
            self._enforce_retention(connection, self._clock())
        self._rewrite()

    def _checked(self, example: bytes) -> bytes:
        if not isinstance(example, bytes):
            raise validation.UsageError(f"examples must be bytes, got a {type(example).__name__}.")
        if len(example) + _ROW_BYTES > self._retention.max_bytes:
            raise validation.UsageError(
                f"An example of {len(example)} bytes is larger than the store may be, "
                f"max_bytes={self._retention.max_bytes}."
            )
        return example

    def _enforce_retention(self, connection: sqlite3.Connection, now: float) -> None:
        max_age_s, max_bytes = self._retention.max_age_s, self._retention.max_bytes
        [(oldest,)] = connection.execute("SELECT min(recorded) FROM examples")
        if not isinstance(oldest, float | None):
            raise self._database.damaged("an example's time is none")
        if oldest is not None and oldest < now - max_age_s:
            limit = now - max_age_s * (1 - _EXPIRE_EARLY)
            _count_deletion(
                connection, connection.execute("DELETE FROM examples WHERE recorded < ?", (limit,))
            )
        size, _, _ = self._state(connection.execute(_STATE).fetchall())
        if size > max_bytes:
            # `needed` is the size of an example and all newer ones; the newest always stays.
            _count_deletion(
                connection,
                connection.execute(
                    "DELETE FROM examples WHERE example_id IN (SELECT example_id FROM ("
                    "SELECT example_id, row_number() OVER newest AS place, "
                    f"sum(length(example) + {_ROW_BYTES}) OVER newest AS needed FROM examples "
                    "WINDOW newest AS (ORDER BY recorded DESC, example_id DESC)) "
                    "WHERE needed > ? AND place > 1)",
                    (int(max_bytes * _KEEP_WHEN_FULL),),
                ),
            )

    def _state(self, rows: list[tuple]) -> tuple[int, int, int]:
        """Checks the rows of `state`: there must be one, of integers."""
        if [list(map(type, row)) for row in rows] != [[int, int, int]]:
            raise self._database.damaged("its counts are missing, or are none")
        return rows[0]

    def _try_to_rewrite(self) -> None:
        # The transaction is committed whether or not this succeeds; the next writer tries again.
        with contextlib.suppress(OSError):
            self._rewrite()

    def _rewrite(self) -> None:
        _, deletions, rewritten = self._state(self._database.read(_STATE))
        if deletions > rewritten:
            self._database.rewrite()
            with self._database.transaction() as connection:
                connection.execute("UPDATE state SET rewritten = max(rewritten, ?)", (deletions,))


def _count_deletion(connection: sqlite3.Connection, deleted: sqlite3.Cursor) -> None:
    if deleted.rowcount > 0:
        connection.execute("UPDATE state SET deletions = deletions + 1")


def _checked_collection(collection: str) -> str:
    if not isinstance(collection, str) or not 0 < len(collection) <= 200:
        raise validation.UsageError(
            f"collection must be a name of 1 to 200 characters, got {collection!r}."
        )
    return collection


class DailyExpiry:
    """Waiting of a device that deletes its expired examples once a day."""

    def __init__(
        self,
        store: SqliteExampleStore,
        wait: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Takes an open store, which has just deleted what had expired.

        `wait` sleeps for a number of seconds, or less; `clock` is monotonic, in seconds.
        """
        self._store = store
        self._wait = wait
        self._clock = clock
        self._due = clock() + _DAY_S

    def __call__(self, seconds: float) -> None:
        """Waits for a number of seconds, or less: no longer than until the next deletion."""
        if self._clock() >= self._due:
            self._due = self._clock() + _DAY_S
            try:
                self._store.expire()
            except OSError as error:  # A full disk ends no device; the next opening tries again.
                _logger.warning("Expired examples cannot be deleted: %s", error)
        self._wait(min(seconds, self._due - self._clock()))
