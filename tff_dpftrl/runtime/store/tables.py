"""The tables of a store."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sql
from typing_extensions import override


class _Bytes(sql.LargeBinary):
    """Column of bytes as the driver returns them; SQLAlchemy's own type copies large values."""

    @override
    def result_processor(self, dialect, coltype):
        return None


METADATA = sql.MetaData()
_NAME = sql.String(200)


def _digest(name: str) -> sql.Column:
    """Makes a column for a digest; it is empty where a migrated store never had one."""
    return sql.Column(name, sql.String(64), nullable=False, server_default="")


def _table(name: str, *columns: sql.Column) -> sql.Table:
    # In SQLAlchemy 1.4, `Table.__new__` appears to return None.
    return sql.Table(name, METADATA, *columns)  # pyright: ignore[reportReturnType]


FORMAT = _table("store_format", sql.Column("version", sql.Integer, primary_key=True))
LEASES = _table(
    "leases",
    sql.Column("population", _NAME, primary_key=True),
    sql.Column("owner", sql.Text, nullable=False),
    sql.Column("epoch", sql.BigInteger, nullable=False),
    # Called `expires_at` in format 1 and `ends_at` in format 2: a server of such a version that
    # still runs finds no such column. It can neither lead, nor commit rows without digests, nor
    # take pieces for damage.
    sql.Column("valid_until", sql.Float(53), nullable=False),
    _digest("digest"),
)
COMMITS = _table(  # One row a task: the only state that it may go on from.
    "commits",
    sql.Column("population", _NAME, primary_key=True),
    sql.Column("task", _NAME, primary_key=True),
    sql.Column("rounds_done", sql.BigInteger, nullable=False),
    sql.Column("epoch", sql.BigInteger, nullable=False),
    sql.Column("model", _Bytes, nullable=False),
    sql.Column("state", _Bytes, nullable=False),
    sql.Column("metrics", sql.Text, nullable=False),
    _digest("model_digest"),
    _digest("state_digest"),
    _digest("first_digest"),  # Start of the chain of the task's rounds.
    _digest("digest"),  # Digest of the last round.
    # Attempt at the next round that has begun; empty if there is none.
    sql.Column("attempt", sql.Text, nullable=False, server_default=""),
)
ROUNDS = _table(  # One row a committed round; its key makes a second commit impossible.
    "rounds",
    sql.Column("population", _NAME, primary_key=True),
    sql.Column("task", _NAME, primary_key=True),
    sql.Column("round", sql.BigInteger, primary_key=True),
    sql.Column("epoch", sql.BigInteger, nullable=False),
    sql.Column("committed_at", sql.Float(53), nullable=False),
    sql.Column("metrics", sql.Text, nullable=False),
    _digest("model_digest"),
    _digest("state_digest"),
    _digest("digest"),
)
PIECES = _table(  # Large models and states of the last commits, whose own columns are empty then.
    "pieces",
    sql.Column("population", _NAME, primary_key=True),
    sql.Column("task", _NAME, primary_key=True),
    sql.Column("content", sql.String(5), primary_key=True),  # "model" or "state".
    sql.Column("number", sql.BigInteger, primary_key=True),  # From 0.
    sql.Column("bytes", _Bytes, nullable=False),
)
HEAD = [column for column in COMMITS.c if column.name not in ("model", "state")]
"""The columns of a task's last commit without the large ones."""


def execute(
    connection: sql.engine.Connection, statement: Any, values: Any = None
) -> sql.engine.CursorResult:
    """Executes a statement; unlike SQLAlchemy's method, its type says that there is a result.

    SQLAlchemy keeps the statement, and the values within it, in a cache. It does not keep `values`:
    large ones belong there.
    """
    return connection.execute(statement, values)  # pyright: ignore[reportReturnType]


def is_task(table: sql.Table, population: str, task: str) -> sql.sql.ColumnElement:
    """Returns the condition that a row of the table belongs to a task."""
    return sql.and_(table.c.population == population, table.c.task == task)


def rounds_of(head: sql.engine.Row, start: int = 0) -> sql.sql.Select:
    """Builds the query for the committed rounds of a task from `start` on, in order.

    Rounds that were committed after `head`, the task's row of commits, was read are left out.
    """
    return (
        sql.select(ROUNDS)
        .where(
            is_task(ROUNDS, head.population, head.task),
            ROUNDS.c.round >= start,
            ROUNDS.c.round < head.rounds_done,
        )
        .order_by(ROUNDS.c.round)
    )
