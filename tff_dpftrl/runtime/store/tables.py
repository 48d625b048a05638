"""The tables of a store."""

from __future__ import annotations

import sqlalchemy as sql


class _Bytes(sql.LargeBinary):
    """Bytes as the driver gives them: SQLAlchemy would make a billion of them of a billion."""

    def result_processor(self, dialect, coltype):
        """Makes nothing of them."""
        return None


METADATA = sql.MetaData()
_NAME = sql.String(200)


def _digest(name: str) -> sql.Column:
    """A column for a digest; empty for what was never known, as of a migrated store."""
    return sql.Column(name, sql.String(64), nullable=False, server_default="")


FORMAT = sql.Table("store_format", METADATA, sql.Column("version", sql.Integer, primary_key=True))
LEASES = sql.Table(
    "leases",
    METADATA,
    sql.Column("population", _NAME, primary_key=True),
    sql.Column("owner", sql.Text, nullable=False),
    sql.Column("epoch", sql.BigInteger, nullable=False),
    # In format 1 `expires_at`: a server of that version that still runs finds no such column, and
    # can neither lead nor commit rows without digests.
    sql.Column("ends_at", sql.Float(53), nullable=False),
    _digest("digest"),
)
COMMITS = sql.Table(  # One row a task: the only state that it may go on from.
    "commits",
    METADATA,
    sql.Column("population", _NAME, primary_key=True),
    sql.Column("task", _NAME, primary_key=True),
    sql.Column("rounds_done", sql.BigInteger, nullable=False),
    sql.Column("epoch", sql.BigInteger, nullable=False),
    sql.Column("model", _Bytes, nullable=False),
    sql.Column("state", _Bytes, nullable=False),
    sql.Column("metrics", sql.Text, nullable=False),
    _digest("model_digest"),
    _digest("state_digest"),
    _digest("first_digest"),  # What the chain of the task's rounds begins with.
    _digest("digest"),  # Of the last round.
)
ROUNDS = sql.Table(  # One row a committed round; its key makes a second commit impossible.
    "rounds",
    METADATA,
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
HEAD = [column for column in COMMITS.c if column.name not in ("model", "state")]
"""The columns of a task's last commit without the large ones."""


def is_task(table: sql.Table, population: str, task: str) -> sql.sql.ColumnElement:
    """The condition that a row of the table is of a task."""
    return sql.and_(table.c.population == population, table.c.task == task)


def rounds_of(head: sql.engine.Row, start: int = 0) -> sql.sql.Select:
    """The query of the committed rounds of a task, in order.

    Args:
      head: Row of the table of commits, of the task. Rounds that were committed since it was read
        are left out.
      start: Index of the first round.

    Returns:
      The query.
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
