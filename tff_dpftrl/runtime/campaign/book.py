"""What a store's database notes by itself, in the order of its transactions.

Triggers of the database write down every change of a lease and every commit, inside of the
transaction that makes it. So there is a record of what was committed, and under which lease,
that no server has a hand in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sqlite3

LEASE, COMMIT, ROUND, CHANGED = "lease", "commit", "round", "changed"

_TABLE = """
CREATE TABLE campaign_book (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    task TEXT NOT NULL DEFAULT '',
    rounds INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL DEFAULT '',
    at REAL NOT NULL DEFAULT 0,
    content BLOB NOT NULL DEFAULT ''
);
CREATE TRIGGER book_of_leases AFTER UPDATE ON leases
    WHEN NEW.epoch <> OLD.epoch OR NEW.owner <> OLD.owner
    BEGIN INSERT INTO campaign_book (kind, epoch, owner)
        VALUES ('lease', NEW.epoch, NEW.owner); END;
CREATE TRIGGER book_of_commits AFTER UPDATE ON commits
    BEGIN INSERT INTO campaign_book (kind, task, rounds, epoch, content)
        VALUES ('commit', NEW.task, NEW.rounds_done, NEW.epoch, NEW.model); END;
CREATE TRIGGER book_of_rounds AFTER INSERT ON rounds
    BEGIN INSERT INTO campaign_book (kind, task, rounds, epoch, at, content)
        VALUES ('round', NEW.task, NEW.round + 1, NEW.epoch, NEW.committed_at, NEW.metrics); END;
"""
_CHANGES = """
CREATE TRIGGER changed_{name} AFTER {what} ON {table}
    BEGIN INSERT INTO campaign_book (kind, task) VALUES ('changed', '{table}'); END;
"""
_FORBIDDEN = (("UPDATE", "rounds"), ("DELETE", "rounds"), ("DELETE", "commits"))


@dataclasses.dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
      number: Its place in the order of transactions.
      kind: `LEASE`: another owner or epoch; `COMMIT`: a task's row was replaced; `ROUND`: a
        row was added to the history; `CHANGED`: what was committed was changed or removed.
      task: Name of the task; of `CHANGED`, of the table.
      rounds: Rounds done with it.
      epoch: The epoch.
      owner: Who leads; empty if nobody.
      at: Seconds since 1970, by the clock of the server that has committed.
      content: The model of a commit, the metrics of a round.
    """

    number: int
    kind: str
    task: str
    rounds: int
    epoch: int
    owner: str
    at: float
    content: bytes = dataclasses.field(repr=False)


def path_of(store: pathlib.Path) -> pathlib.Path:
    """The database of a store in a folder."""
    return store / "store.sqlite"


def _connect(store: pathlib.Path) -> sqlite3.Connection:
    return sqlite3.connect(path_of(store), timeout=30, isolation_level=None)


def begin(store: pathlib.Path) -> None:
    """Has the database of a store begin its book; once, after its tables were made."""
    with contextlib.closing(_connect(store)) as connection:
        connection.executescript(_TABLE)
        for what, table in _FORBIDDEN:
            name = f"{table}_by_{what.lower()}"
            connection.executescript(_CHANGES.format(name=name, what=what, table=table))


class Reader:
    """Reads a book, also while servers write it."""

    def __init__(self, store: pathlib.Path):
        """Opens the book of a store.

        Args:
          store: The folder.
        """
        self._connection = _connect(store)

    def close(self) -> None:
        """Closes it."""
        self._connection.close()

    def last(self) -> int:
        """The number of the last line."""
        return self._connection.execute("SELECT max(number) FROM campaign_book").fetchone()[0] or 0

    def rounds_after(self, number: int, task: str = "") -> list[tuple[int, str]]:
        """Numbers and tasks of rounds that were committed after a line."""
        return self._connection.execute(
            "SELECT number, task FROM campaign_book WHERE kind = 'round' AND number > ? "
            "AND (? = '' OR task = ?) ORDER BY number",
            (number, task, task),
        ).fetchall()

    def lines_after(self, number: int, kind: str = "") -> list[Line]:
        """Lines after one, in order; of one kind if it is named."""
        rows = self._connection.execute(
            "SELECT * FROM campaign_book WHERE number > ? AND (? = '' OR kind = ?) ORDER BY number",
            (number, kind, kind),
        )
        return [Line(*row[:7], _bytes(row[7])) for row in rows.fetchall()]

    def rows(self, query: str) -> list[tuple]:
        """Rows of the store's own tables."""
        return self._connection.execute(query).fetchall()


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content
