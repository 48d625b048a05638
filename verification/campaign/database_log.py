"""What a store's database notes by itself, in the order of its transactions.

Triggers of the database write down every change of a lease and every commit, inside of the
transaction that makes it. So there is a record of what was committed, and under which lease,
that no server has a hand in.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import sqlalchemy

from tff_dpftrl.runtime.actors import population

LEASE, COMMIT, ROUND, CHANGED = "lease", "commit", "round", "changed"

_BUSY_SECONDS = 30  # For which a read waits for a server that writes.
_TABLE = """
CREATE TABLE campaign_book (
    number {number},
    kind TEXT NOT NULL,
    task TEXT NOT NULL DEFAULT '',
    rounds BIGINT NOT NULL DEFAULT 0,
    epoch BIGINT NOT NULL DEFAULT 0,
    owner TEXT NOT NULL DEFAULT '',
    at DOUBLE PRECISION NOT NULL DEFAULT 0,
    content {bytes} NOT NULL DEFAULT ''
)
"""
_COLUMNS = "number, kind, task, rounds, epoch, owner, at, content"
_CHANGE = "(kind, task) VALUES ('changed', '{table}')"
_ALWAYS = "1 = 1"
# All but the note that an attempt at the next round has begun, which leaves all else as it is.
_COMMITTED = " OR ".join(
    ["NEW.attempt = ''"]
    + [f"NEW.{column} <> OLD.{column}" for column in ("rounds_done", "epoch", "model", "state")]
)
_TRIGGERS = (  # What happens, to rows of which table, when, and the line that it adds.
    (
        "UPDATE",
        "leases",
        "NEW.epoch <> OLD.epoch OR NEW.owner <> OLD.owner",
        "(kind, task, epoch, owner) VALUES ('lease', NEW.population, NEW.epoch, NEW.owner)",
    ),
    (
        "UPDATE",
        "commits",
        _COMMITTED,
        "(kind, task, rounds, epoch, content) "
        "VALUES ('commit', NEW.task, NEW.rounds_done, NEW.epoch, NEW.model)",
    ),
    (
        "INSERT",
        "rounds",
        _ALWAYS,
        "(kind, task, rounds, epoch, at, content) VALUES "
        "('round', NEW.task, NEW.round + 1, NEW.epoch, NEW.committed_at, {metrics})",
    ),
    *(
        (what, table, _ALWAYS, _CHANGE.format(table=table))
        for what, table in (("UPDATE", "rounds"), ("DELETE", "rounds"), ("DELETE", "commits"))
    ),
)


@dataclasses.dataclass(frozen=True)
class _Dialect:
    """SQL of the table and the triggers for a kind of database."""

    number: str
    bytes: str
    metrics: str
    trigger: str


_DIALECTS = {
    "sqlite": _Dialect(
        "INTEGER PRIMARY KEY AUTOINCREMENT",
        "BLOB",
        "CAST(NEW.metrics AS BLOB)",
        "CREATE TRIGGER {name} AFTER {what} ON {table} WHEN {when} BEGIN {line}; END",
    ),
    # Numbers are in the order of transactions, since each locks the row of the lease first.
    "postgresql": _Dialect(
        "BIGSERIAL PRIMARY KEY",
        "BYTEA",
        "convert_to(NEW.metrics, 'UTF8')",
        "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ "
        "BEGIN {line}; RETURN NULL; END $$; "
        "CREATE TRIGGER {name} AFTER {what} ON {table} FOR EACH ROW WHEN ({when}) "
        "EXECUTE FUNCTION {name}()",
    ),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
      number: Its place in the order of transactions.
      kind: `LEASE`: another owner or epoch; `COMMIT`: a task's row was replaced; `ROUND`: a
        row was added to the history; `CHANGED`: what was committed was changed or removed.
      task: Name of the task; of `CHANGED`, of the table; of `LEASE`, of the population.
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

    @property
    def is_release(self) -> bool:
        """Whether a round was released, rather than skipped."""
        return self.kind == ROUND and not json.loads(self.content).get(population.SKIPPED)


def connect(store: pathlib.Path | str) -> sqlalchemy.engine.Engine:
    """Opens the database of a store so that every statement is a transaction.

    Args:
      store: The store's folder, or the URL of its PostgreSQL database.

    Returns:
      The database; to be disposed of.
    """
    if isinstance(store, str):
        url = store.replace("postgresql:", "postgresql+psycopg2:", 1)  # As the product does.
        return sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    url = sqlalchemy.engine.URL.create("sqlite", database=str(store / "store.sqlite"))
    return sqlalchemy.create_engine(
        url, isolation_level="AUTOCOMMIT", connect_args={"timeout": _BUSY_SECONDS}
    )


def begin(store: pathlib.Path | str) -> None:
    """Has the database of a store begin its log; once, after its tables were made.

    Args:
      store: The store's folder, or the URL of its PostgreSQL database.
    """
    engine = connect(store)
    dialect = _DIALECTS[engine.dialect.name]
    with engine.connect() as connection:
        connection.exec_driver_sql(_TABLE.format(number=dialect.number, bytes=dialect.bytes))
        for what, table, when, line in _TRIGGERS:
            statement = dialect.trigger.format(
                name=f"book_of_{table}_{what.lower()}",
                what=what,
                table=table,
                when=when,
                line=f"INSERT INTO campaign_book {line.format(metrics=dialect.metrics)}",
            )
            connection.exec_driver_sql(statement)
    engine.dispose()


class Reader:
    """Reads the log, also while servers write it."""

    def __init__(self, store: pathlib.Path | str):
        """Opens the log of a store.

        Args:
          store: The store's folder, or the URL of its PostgreSQL database.
        """
        self._engine = connect(store)
        self._connection = self._engine.connect()

    def close(self) -> None:
        """Closes it."""
        self._connection.close()
        self._engine.dispose()

    def last(self) -> int:
        """Returns the number of the last line."""
        return self.rows("SELECT max(number) FROM campaign_book")[0][0] or 0

    def releases_after(self, number: int, task: str = "") -> list[int]:
        """Returns the numbers of the lines, after one, of rounds that were released.

        Args:
          number: Number of a line.
          task: Name of the task; all tasks if empty.
        """
        lines = self.lines_after(number, ROUND)
        return [line.number for line in lines if line.is_release and task in ("", line.task)]

    def lines_after(self, number: int, kind: str = "") -> list[Line]:
        """Lines after one, in order; of one kind if it is named."""
        rows = self.rows(
            f"SELECT {_COLUMNS} FROM campaign_book WHERE number > :number "
            "AND (:kind = '' OR kind = :kind) ORDER BY number",
            number=number,
            kind=kind,
        )
        return [Line(*row[:7], _bytes(row[7])) for row in rows]

    def rows(self, query: str, **values: object) -> list[tuple]:
        """Rows of the store's own tables, or of the log."""
        found = self._connection.execute(sqlalchemy.text(query), values)
        return [tuple(row) for row in found]


def _bytes(content: bytes | memoryview | str) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)
