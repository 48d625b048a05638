"""Migration of stores of formats 1, without digests, 2, without pieces, and 3, without attempts."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sql
from sqlalchemy import schema

from tff_dpftrl import json_text
from tff_dpftrl.runtime.store import digests, tables


def add_digests(connection: sql.engine.Connection) -> None:
    """Adds the columns of digests, and computes the digests of the rows as they are.

    The migration is part of the caller's transaction. A store does not keep the models and states
    of earlier rounds: their digests remain empty. Raises `DamagedRow` for values of other types.
    """
    connection.exec_driver_sql("ALTER TABLE leases RENAME COLUMN expires_at TO valid_until")
    for table in (tables.LEASES, tables.COMMITS, tables.ROUNDS):
        for column in table.c:
            if column.name.endswith("digest"):
                _add_column(connection, table, column)
    for lease in tables.execute(connection, sql.select(tables.LEASES)).all():
        _check_types("a lease", lease, owner=str, epoch=int, valid_until=float)
        digest = digests.lease_digest(lease.population, lease.owner, lease.epoch, lease.valid_until)
        _update(connection, tables.LEASES, lease, digest=digest)
    tasks = sql.select(tables.COMMITS.c.population, tables.COMMITS.c.task)
    for population, task in tables.execute(connection, tasks).all():
        last = sql.select(tables.COMMITS).where(tables.is_task(tables.COMMITS, population, task))
        [head] = tables.execute(connection, last).all()
        _add_to_task(connection, head)


def add_attempts(connection: sql.engine.Connection) -> None:
    """Adds the column of attempts. A server of an earlier version that still runs ignores it."""
    _add_column(connection, tables.COMMITS, tables.COMMITS.c.attempt)


def _add_column(connection: sql.engine.Connection, table: sql.Table, column: sql.Column) -> None:
    made = schema.CreateColumn(column).compile(dialect=connection.dialect)
    connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {made}")


def rename_end_of_leases(connection: sql.engine.Connection) -> None:
    """Renames the column of format 2 without which servers of that version write nothing."""
    connection.exec_driver_sql("ALTER TABLE leases RENAME COLUMN ends_at TO valid_until")


def _add_to_task(connection: sql.engine.Connection, head: sql.engine.Row) -> None:
    content = dict.fromkeys(("model", "state"), (bytes, memoryview))
    _check_types("the last commit of a task", head, rounds_done=int, epoch=int, **content)
    last_digests = digests.content_digests(head.model, head.state)
    no_digests = dict.fromkeys(last_digests, "")
    known = no_digests if head.rounds_done else last_digests
    digest = first_digest = digests.task_digest(head.population, head.task, **known)
    for row in tables.execute(connection, tables.rounds_of(head)).all():
        _check_types("a round", row, round=int, epoch=int, committed_at=float)
        known = last_digests if row.round == head.rounds_done - 1 else no_digests
        digest = digests.round_digest({**row._asdict(), **known}, digest)
        _update(connection, tables.ROUNDS, row, digest=digest, **known)
    _update(
        connection, tables.COMMITS, head, digest=digest, first_digest=first_digest, **last_digests
    )


def _check_types(what: str, row: sql.engine.Row, **types: Any) -> None:
    """Refuses values of other types than are written: SQLite keeps any type in any column."""
    values = row._asdict()
    has_types = all(isinstance(values[name], kind) for name, kind in types.items())
    try:
        has_types &= isinstance(json_text.parse(values.get("metrics", "{}")), dict)
    except (TypeError, ValueError):
        has_types = False
    if not has_types:
        raise digests.DamagedRow(f"{what} holds something else than was written")


def _update(
    connection: sql.engine.Connection, table: sql.Table, row: sql.engine.Row, **values: str
) -> None:
    old = row._asdict()
    is_row = [column == old[column.name] for column in table.c if column.primary_key]
    tables.execute(connection, table.update().where(*is_row).values(values))
