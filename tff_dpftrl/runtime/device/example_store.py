"""Where an application keeps examples for training on its device (paper 004, section 3).

`ExampleStore` is what the runtime asks of any store: serialized examples of a collection,
newest first. `SqliteExampleStore` is one in a file, for applications that have none of their
own: it forgets examples that are too old or too many, by itself.

What is deleted is gone from the file, whoever asked for it: the rows are overwritten, and the
file is written anew without them (see `PrivateDatabase.rewrite`). If the process dies between
the two, the next one to write does the second. What a file system or a flash disk keeps of
blocks that were overwritten, and reading the disk of a stolen device, are the platform's to
prevent, by encryption at rest.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterable

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import private_database

# Bytes that the file needs for an example besides its own, about.
_ROW_BYTES = 80
# Rewriting the file takes time: so what will expire soon goes with what has expired, and a
# full store makes some room at once.
_EXPIRE_EARLY = 1 / 32
_KEEP_WHEN_FULL = 7 / 8

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
        """Reads what a plan asks for.

        Args:
          collection: Name of the collection.
          max_examples: Largest number of examples, at least 1.
          recorded_since: Seconds since 1970; older examples are left out. None for all.

        Returns:
          Serialized examples, newest first; none if there is no such collection.

        Raises:
          ValueError: If an argument is out of range, or the store is damaged.
          OSError: If the store cannot be read.
        """


@dataclasses.dataclass(frozen=True)
class Retention:
    """How long, and how much, a store keeps.

    Attributes:
      max_age_s: Seconds after which an example is deleted, at the next writing; it is not
        read from then on. It may go up to 1/32 of that time earlier.
      max_bytes: Size of all examples beyond which the oldest are deleted, each with 80
        bytes more than its own; the file may be somewhat larger.
    """

    max_age_s: float = 30 * 24 * 3600.0
    max_bytes: int = 16_000_000

    def __post_init__(self):
        validation.positive("max_age_s", self.max_age_s)
        validation.integer("max_bytes", self.max_bytes, minimum=1)


class SqliteExampleStore(ExampleStore):
    """An example store in one SQLite file, which threads and processes may share."""

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
        """Opens a store, or makes an empty one.

        Args:
          path: The file; its folder must exist. Its mode becomes 0600.
          clock: Seconds since 1970.
          retention: What to keep; the same for all who write to this store.

        Returns:
          The store.

        Raises:
          ValueError: If the file is no example store, or damaged.
          OSError: If it cannot be used.
        """
        database = private_database.PrivateDatabase.open(path, _KIND)
        return cls(database, Retention() if retention is None else retention, clock)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def select(
        self, collection: str, *, max_examples: int, recorded_since: float | None = None
    ) -> list[bytes]:
        """See the base class; what has expired is left out."""
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
        """Number of examples of each collection; expired ones may be among them."""
        return dict(
            self._database.read("SELECT collection, count(*) FROM examples GROUP BY 1 ORDER BY 1")
        )

    def add(
        self, collection: str, examples: Iterable[bytes], *, recorded: float | None = None
    ) -> None:
        """Adds examples, all or none; the later of one call are the newer.

        Args:
          collection: Name of the collection; made if it is new.
          examples: Serialized examples.
          recorded: Seconds since 1970; now if None.

        Raises:
          ValueError: If an example is not bytes or larger than the store may be, or
            `recorded` is in the future.
          OSError: If the file cannot be written; nothing was added then.
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
        """Deletes what is too old; `add` does so too, and this is for times without it.

        Raises:
          ValueError: If the file is damaged.
          OSError: If it cannot be written.
        """
        with self._database.transaction() as connection:
            self._enforce_retention(connection, self._clock())
        self._try_to_rewrite()

    def clear(self, collection: str | None = None) -> None:
        """Deletes a collection, or everything; gone from the file when this returns.

        Args:
          collection: Name of the collection; None for all.

        Raises:
          ValueError: If the file is damaged.
          OSError: If it cannot be written.
        """
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
            # What is needed by an example and all that are newer; the newest itself stays.
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
        """The one row of `state`, if it is there and holds integers."""
        if [list(map(type, row)) for row in rows] != [[int, int, int]]:
            raise self._database.damaged("its counts are missing, or are none")
        return rows[0]

    def _try_to_rewrite(self) -> None:
        # The examples were added or have expired all the same; the next writer tries again.
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
