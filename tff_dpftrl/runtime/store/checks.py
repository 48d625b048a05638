"""Checks of a whole database when it is opened, and the error that reports damage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sql
from sqlalchemy import exc

from tff_dpftrl.runtime.store import digests, interface, tables

_AT_ONCE = 1000  # Rows in memory while a history is checked.


@contextlib.contextmanager
def damage_reported(connection: sql.engine.Connection, name: str) -> Iterator[None]:
    """Turns a damaged row into `StoreDamaged`, with the store's place and the backup to bring."""
    try:
        yield
    except digests.DamagedRow as damaged:
        raise interface.StoreDamaged(name, str(damaged), _known_rounds(connection)) from None


def _known_rounds(connection: sql.engine.Connection) -> dict[str, int]:
    """Counts the committed rounds by task, as far as they can be read."""
    commits, rounds = tables.COMMITS.c, tables.ROUNDS.c
    known: dict[str, int] = {}
    try:
        count = sql.select(rounds.population, rounds.task, sql.func.count())
        for population, task, number in tables.execute(
            connection, count.group_by(rounds.population, rounds.task)
        ):
            known[f"{population}/{task}"] = number
        heads = sql.select(commits.population, commits.task, commits.rounds_done, commits.digest)
        for head in tables.execute(connection, heads).all():
            is_task = tables.is_task(tables.ROUNDS, head.population, head.task)
            with_digest = sql.select(rounds.round).where(is_task, rounds.digest == head.digest)
            last = tables.execute(connection, with_digest).scalar()
            # The round with the last digest is right even if the number itself is damaged.
            done = head.rounds_done if last is None else last + 1
            task = f"{head.population}/{head.task}"
            if isinstance(done, int):
                known[task] = max(known.get(task, 0), done)
    except (exc.SQLAlchemyError, TypeError):  # The rows are damaged, too, or of another format.
        return {}
    return known


def check_file(connection: sql.engine.Connection) -> None:
    """Checks the structure of SQLite's file (`DamagedRow`); other databases check their own."""
    if connection.dialect.name == "sqlite":
        problem = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar()
        if problem != "ok":
            raise digests.DamagedRow(f"SQLite finds in it: {' '.join(str(problem).split())}")


def check_rows(connection: sql.engine.Connection) -> None:
    """Checks the leases, and the digests of all rounds of all tasks (`DamagedRow`).

    Models and states are checked later, when they are read.
    """
    commits, rounds = tables.COMMITS, tables.ROUNDS
    heads = tables.execute(connection, sql.select(*tables.HEAD)).all()
    for head in heads:
        query = tables.rounds_of(head).execution_options(
            stream_results=True, max_row_buffer=_AT_ONCE
        )
        with contextlib.closing(tables.execute(connection, query)) as rows:
            digests.check_rounds(head, rows)
    same_task = sql.and_(
        commits.c.population == rounds.c.population, commits.c.task == rounds.c.task
    )
    uncommitted = (
        sql.select(rounds.c.population, rounds.c.task)
        .select_from(rounds.outerjoin(commits, same_task))
        .where(sql.or_(commits.c.task.is_(None), rounds.c.round >= commits.c.rounds_done))
    )
    beyond = tables.execute(connection, uncommitted).first()
    if beyond is not None:
        raise digests.DamagedRow(
            f"the task {beyond.task!r} of the population {beyond.population!r} has rounds that its "
            "last commit does not know"
        )
    leases = {}
    for lease in tables.execute(connection, sql.select(tables.LEASES)).all():
        digests.check_lease(lease)
        leases[lease.population] = lease.epoch
    for head in heads:  # They were read before the leases, whose epochs only grow.
        digests.check_epoch(head, leases.get(head.population, 0))
