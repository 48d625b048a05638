"""A store in a database: leases and commits as rows that transactions lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sql
from sqlalchemy import exc

from tff_dpftrl import json_text
from tff_dpftrl.runtime.store import database, interface

_BYTES = (bytes, memoryview)
_LEASES, _COMMITS, _ROUNDS = database.LEASES, database.COMMITS, database.ROUNDS


class SqlStore(interface.Store):
    """A store that processes, and with PostgreSQL machines, share; for many threads.

    Whoever takes the lease and whoever commits locks the population's lease row first:
    a commit is either before the takeover, and seen by the new leader, or refused.
    """

    def __init__(self, place: str | os.PathLike[str]):
        """Opens a store, made if there is none.

        Args:
          place: A folder for SQLite, or a database URL, like "postgresql://user@host/name".

        Raises:
          ValueError: If the URL cannot be used, or a driver for it is not installed.
          interface.StoreError: If the place cannot be made, reached or written.
        """
        self._engine, self._name = database.open_database(place)

    @contextlib.contextmanager
    def _transaction(self, action: str) -> Iterator[sql.engine.Connection]:
        with database.one_line_errors(f"{action} the store at {self._name}"):
            with self._engine.begin() as connection:
                yield connection

    def _reading(self) -> contextlib.AbstractContextManager[sql.engine.Connection]:
        return self._transaction("read")

    def _writing(self) -> contextlib.AbstractContextManager[sql.engine.Connection]:
        return self._transaction("write to")

    def acquire(
        self, population: str, owner: str, *, now: float, duration: float
    ) -> interface.Lease:
        """See the base class."""
        interface.check_lease(population, owner, now, duration)
        self._ensure_lease_row(population)
        with self._writing() as connection:
            last = _locked_lease(connection, population)
            epoch = last.epoch + 1
            if interface.is_held(last, now):
                if last.owner != owner:
                    raise interface.LeaseHeld(last, now)
                epoch = last.epoch
            return _write_lease(
                connection, interface.Lease(population, owner, epoch, now + duration)
            )

    def _ensure_lease_row(self, population: str) -> None:
        """So that there is a row to lock; epoch 0 is nobody's."""
        row = {"population": population, "owner": "", "epoch": 0, "expires_at": 0.0}
        with database.one_line_errors(f"write to the store at {self._name}"):
            with contextlib.suppress(exc.IntegrityError), self._engine.begin() as connection:
                if _read_lease(connection, population) is None:
                    connection.execute(_LEASES.insert().values(row))

    def renew(
        self, population: str, owner: str, epoch: int, *, now: float, duration: float
    ) -> interface.Lease:
        """See the base class."""
        interface.check_lease(population, owner, now, duration)
        with self._writing() as connection:
            last = _locked_lease(connection, population)
            if (last.owner, last.epoch) != (owner, epoch) or not interface.is_held(last, now):
                raise interface.LeaseLost(population, owner, epoch)
            return _write_lease(
                connection, interface.Lease(population, owner, epoch, now + duration)
            )

    def release(self, population: str, owner: str, epoch: int) -> None:
        """See the base class."""
        with self._writing() as connection:
            last = _locked_lease(connection, population)
            if (last.owner, last.epoch) == (owner, epoch):
                _write_lease(connection, interface.Lease(population, "", epoch, last.expires_at))

    def lease(self, population: str) -> interface.Lease | None:
        """See the base class."""
        with self._reading() as connection:
            found = _read_lease(connection, population)
        return found if found is not None and found.epoch else None

    def add_task(
        self, population: str, task: str, *, model: bytes, state: bytes
    ) -> interface.Commit:
        """See the base class."""
        row = {
            "population": population,
            "task": task,
            "rounds_done": 0,
            "epoch": 0,
            "model": model,
            "state": state,
            "metrics": "{}",
        }
        with database.one_line_errors(f"write to the store at {self._name}"):
            try:
                with self._engine.begin() as connection:
                    connection.execute(_COMMITS.insert().values(row))
            except exc.IntegrityError:
                raise interface.TaskExists(population, task) from None
        return interface.Commit(task, 0, 0, model, state)

    def tasks(self, population: str) -> tuple[str, ...]:
        """See the base class."""
        query = sql.select(_COMMITS.c.task).where(_COMMITS.c.population == population)
        with self._reading() as connection:
            return tuple(sorted(connection.execute(query).scalars()))

    def last_commit(self, population: str, task: str) -> interface.Commit:
        """See the base class."""
        with self._reading() as connection:
            row = connection.execute(
                sql.select(_COMMITS).where(_is_task(_COMMITS, population, task))
            ).first()
        if row is None:
            raise interface.UnknownTask(population, task)
        _check(
            row.rounds_done, int, row.epoch, int, row.model, _BYTES, row.state, _BYTES
        )  # Or of a number, `bytes` would make as many.
        return interface.Commit(
            task,
            row.rounds_done,
            row.epoch,
            bytes(row.model),
            bytes(row.state),
            _metrics(row.metrics),
        )

    def commit(
        self,
        population: str,
        task: str,
        *,
        round_index: int,
        epoch: int,
        model: bytes,
        state: bytes,
        metrics: Mapping[str, Any],
        now: float,
    ) -> interface.Commit:
        """See the base class."""
        interface.check_commit(round_index, epoch)
        text = interface.metrics_text(metrics)
        with self._writing() as connection:
            latest = _locked_lease(connection, population).epoch
            if epoch != latest:
                raise interface.StaleEpoch(population, epoch, latest)
            is_task = _is_task(_COMMITS, population, task)
            swapped = connection.execute(
                _COMMITS.update()
                .where(is_task, _COMMITS.c.rounds_done == round_index)
                .values(
                    rounds_done=round_index + 1,
                    epoch=epoch,
                    model=model,
                    state=state,
                    metrics=text,
                )
            )
            if swapped.rowcount != 1:
                done = connection.execute(sql.select(_COMMITS.c.rounds_done).where(is_task))
                rounds_done = done.scalar()
                if rounds_done is None:
                    raise interface.UnknownTask(population, task)
                raise interface.RoundConflict(task, round_index, rounds_done)
            connection.execute(
                _ROUNDS.insert().values(
                    population=population,
                    task=task,
                    round=round_index,
                    epoch=epoch,
                    committed_at=now,
                    metrics=text,
                )
            )
        return interface.Commit(task, round_index + 1, epoch, model, state, json_text.parse(text))

    def history(self, population: str, task: str) -> list[dict[str, Any]]:
        """See the base class."""
        columns = [_ROUNDS.c[name] for name in interface.HISTORY_COLUMNS]
        query = (
            sql.select(*columns, _ROUNDS.c.metrics)
            .where(_is_task(_ROUNDS, population, task))
            .order_by(_ROUNDS.c.round)
        )
        known = sql.select(_COMMITS.c.task).where(_is_task(_COMMITS, population, task))
        with self._reading() as connection:
            if connection.execute(known).first() is None:
                raise interface.UnknownTask(population, task)
            rows = connection.execute(query).all()
        return [
            {**dict(zip(interface.HISTORY_COLUMNS, row, strict=False)), **_metrics(row.metrics)}
            for row in rows
        ]

    def close(self) -> None:
        """See the base class."""
        self._engine.dispose()


def _check(*values_and_types: Any) -> None:
    """Refuses values of other types than were written: SQLite keeps any type in any column."""
    pairs = zip(values_and_types[::2], values_and_types[1::2], strict=True)
    if not all(isinstance(value, kind) for value, kind in pairs):
        raise _damaged()


def _metrics(text: object) -> dict[str, Any]:
    """The metrics of a row."""
    try:
        found = json_text.parse(text)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, dict):
        raise _damaged()
    return found


def _damaged() -> interface.StoreError:
    return interface.StoreError(
        "The store is damaged: a row holds something else than was written. Restore a backup."
    )


def _is_task(table: sql.Table, population: str, task: str) -> sql.sql.ColumnElement:
    return sql.and_(table.c.population == population, table.c.task == task)


def _read_lease(
    connection: sql.engine.Connection, population: str, *, lock: bool = False
) -> interface.Lease | None:
    query = sql.select(_LEASES).where(_LEASES.c.population == population)
    row = connection.execute(query.with_for_update() if lock else query).first()
    if row is None:
        return None
    _check(row.owner, str, row.epoch, int, row.expires_at, (int, float))
    return interface.Lease(*row)


def _locked_lease(connection: sql.engine.Connection, population: str) -> interface.Lease:
    """The last lease, which nobody can change before the transaction ends; epoch 0 if none."""
    found = _read_lease(connection, population, lock=True)
    return interface.Lease(population, "", 0, 0.0) if found is None else found


def _write_lease(connection: sql.engine.Connection, lease: interface.Lease) -> interface.Lease:
    connection.execute(
        _LEASES.update()
        .where(_LEASES.c.population == lease.population)
        .values(owner=lease.owner, epoch=lease.epoch, expires_at=lease.expires_at)
    )
    return lease
