"""A store in a database: leases and commits are rows that transactions lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sql
from sqlalchemy import exc
from typing_extensions import override

from tff_dpftrl import json_text
from tff_dpftrl.runtime.store import checks, contents, database, digests, interface, tables

_LEASES, _COMMITS, _ROUNDS = tables.LEASES, tables.COMMITS, tables.ROUNDS
_PIECES = tables.PIECES
_PIECE_BYTES = 1 << 20
"""Largest size of a model or state within its row, and of a piece. Databases copy a value several
times, and keep its memory."""


class SqlStore(interface.Store):
    """A store that processes share, and with PostgreSQL machines too; thread-safe.

    Acquiring the lease and committing both lock the population's lease row first. So a commit
    either comes before a takeover, and the new leader sees it, or it is refused.
    """

    def __init__(self, place: str | os.PathLike[str], *, leaves_states: bool = False):
        """Opens a store, and makes it if there is none.

        The place is a folder for SQLite, or a URL like "postgresql://user@host/name". With
        `leaves_states`, large states of commits stay in the store until they are read, so that a
        server has none in memory while devices train. Raises StoreError if the place cannot be
        made, reached or written, or the store is damaged.
        """
        self._engine, self._name = database.open_database(place)
        self._leaves_states = leaves_states
        # All statements of a reader see the same commit: its row, its rounds and its pieces.
        self._snapshots = database.for_reading(self._engine)

    @contextlib.contextmanager
    def _transaction(
        self, engine: sql.engine.Engine, action: str
    ) -> Iterator[sql.engine.Connection]:
        with database.one_line_errors(f"{action} the store at {self._name}"):
            with engine.begin() as connection:
                with checks.damage_reported(connection, self._name):
                    yield connection

    def _reading(self) -> contextlib.AbstractContextManager[sql.engine.Connection]:
        return self._transaction(self._snapshots, "read")

    def _writing(self) -> contextlib.AbstractContextManager[sql.engine.Connection]:
        return self._transaction(self._engine, "write to")

    @override
    def acquire(
        self, population: str, owner: str, *, now: float, duration: float
    ) -> interface.Lease:
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
        """Inserts the row that is locked, if there is none; epoch 0 belongs to no lease."""
        lease = interface.Lease(population, "", 0, 0.0)
        with self._writing() as connection:
            if _read_lease(connection, population) is None:
                _insert_if_new(connection, _LEASES, _lease_row(lease))

    @override
    def renew(
        self, population: str, owner: str, epoch: int, *, now: float, duration: float
    ) -> interface.Lease:
        interface.check_lease(population, owner, now, duration)
        with self._writing() as connection:
            last = _locked_lease(connection, population)
            if (last.owner, last.epoch) != (owner, epoch) or not interface.is_held(last, now):
                raise interface.LeaseLost(population, owner, epoch)
            return _write_lease(
                connection, interface.Lease(population, owner, epoch, now + duration)
            )

    @override
    def release(self, population: str, owner: str, epoch: int) -> None:
        with self._writing() as connection:
            last = _locked_lease(connection, population)
            if (last.owner, last.epoch) == (owner, epoch):
                _write_lease(connection, interface.Lease(population, "", epoch, last.expires_at))

    @override
    def lease(self, population: str) -> interface.Lease | None:
        with self._reading() as connection:
            lease = _read_lease(connection, population)
        return lease if lease is not None and lease.epoch else None

    @override
    def add_task(
        self, population: str, task: str, *, model: bytes, state: contents.Serialised
    ) -> interface.Commit:
        known = digests.content_digests(model, state)
        digest = digests.task_digest(population, task, **known)
        row = {
            "population": population,
            "task": task,
            "rounds_done": 0,
            "epoch": 0,
            "model": _in_row(model),
            "state": _in_row(state),
            "metrics": "{}",
            "first_digest": digest,
            "digest": digest,
            **known,
        }
        with self._writing() as connection:
            if not _insert_if_new(connection, _COMMITS, row):
                raise interface.TaskExists(population, task)
            _write_pieces(connection, population, task, model=model, state=state)
            has_rounds = sql.select(_ROUNDS.c.round).where(
                tables.is_task(_ROUNDS, population, task)
            )
            if tables.execute(connection, has_rounds.limit(1)).first() is not None:
                raise digests.DamagedRow(
                    f"the task {task!r} of the population {population!r} has lost its last commit"
                )
        kept = self._kept(population, task, state, known["state_digest"])
        return interface.Commit(task, 0, 0, model, kept)

    @override
    def tasks(self, population: str) -> tuple[str, ...]:
        query = sql.select(_COMMITS.c.task).where(_COMMITS.c.population == population)
        with self._reading() as connection:
            return tuple(sorted(tables.execute(connection, query).scalars()))

    @override
    def last_commit(self, population: str, task: str) -> interface.Commit:
        with self._reading() as connection:
            row = _checked_head(connection, _COMMITS.c, population, task)
            return self._as_commit(connection, row)

    def _as_commit(
        self, connection: sql.engine.Connection, row: sql.engine.Row
    ) -> interface.Commit:
        """Returns the last commit of a task, with model and state checked."""
        model, state = bytes(_content(connection, row, "model")), _content(connection, row, "state")
        if not self._leaves_states:
            state = bytes(state)
        digests.check_content(row, "model", model)
        digests.check_content(row, "state", state)
        return interface.Commit(
            row.task,
            row.rounds_done,
            row.epoch,
            model,
            self._kept(row.population, row.task, state, row.state_digest),
            json_text.parse(row.metrics),
            row.attempt,
        )

    def _kept(
        self, population: str, task: str, state: contents.Serialised, digest: str
    ) -> bytes | contents.Content:
        """Returns a state that the store has, as a commit has it."""
        if self._leaves_states and len(state) > _PIECE_BYTES:
            head = contents.head_of(contents.parts_of(state))
            return _StoredState(self, population, task, digest, len(state), head)
        return bytes(state)

    def read_state(
        self, population: str, task: str, digest: str, buffers: Sequence[memoryview] | None = None
    ) -> bytes:
        """Reads the state of a task's last commit, into buffers of as many bytes if they are given.

        Raises StoreError if it cannot be read, or the last commit has another state. What is in the
        buffers must not be used then.
        """
        with self._reading() as connection:
            head = _head(connection, _COMMITS.c, population, task)
            if head.state_digest != digest:
                raise interface.StoreError(
                    f"The store at {self._name} has another commit of the task {task!r} than the "
                    "one that the round began with: the round's result must not be released."
                )
            content = _content(connection, head, "state")
            if buffers is None:
                content = found = bytes(content)
            else:
                found = b""
                if not isinstance(content, contents.Content):  # As in stores of format 2.
                    content = contents.InMemory([content])
                # Of another length if pieces are lost; then the digest is another one, too.
                if len(content) == sum(map(len, buffers)):
                    content.fill(buffers)
                    content = contents.InMemory(buffers)
            digests.check_content(head, "state", content)
            return found

    def rows(self, population: str, task: str) -> interface.TaskRows:
        """Returns all that the store has of a task, checked, from one transaction."""
        with self._reading() as connection:
            head = _head(connection, _COMMITS.c, population, task)
            rounds = tables.execute(connection, tables.rounds_of(head)).all()
            digests.check_rounds(head, rounds)
            lease = _read_lease(connection, population)
            columns = {column.name for column in tables.HEAD}
            return interface.TaskRows(
                commit=self._as_commit(connection, head),
                head={k: v for k, v in head._mapping.items() if k in columns},
                rounds=[dict(row._mapping) for row in rounds],
                epoch=0 if lease is None else lease.epoch,
            )

    @override
    def begin_attempt(
        self, population: str, task: str, *, round_index: int, epoch: int, attempt: str
    ) -> None:
        interface.check_commit(round_index, epoch)
        with self._writing() as connection:
            last = _head_under_lease(connection, population, task, epoch)
            if last.rounds_done != round_index:
                raise interface.RoundConflict(task, round_index, last.rounds_done)
            if last.attempt not in ("", attempt):
                raise interface.RoundUsedUp(task, round_index)
            is_task = tables.is_task(_COMMITS, population, task)
            tables.execute(connection, _COMMITS.update().where(is_task).values(attempt=attempt))

    @override
    def commit(
        self,
        population: str,
        task: str,
        *,
        round_index: int,
        epoch: int,
        model: bytes,
        state: contents.Serialised,
        metrics: Mapping[str, Any],
        now: float,
    ) -> interface.Commit:
        interface.check_commit(round_index, epoch)
        round_index, epoch = int(round_index), int(epoch)  # The types that a digest covers.
        text = interface.metrics_text(metrics)
        known = {"epoch": epoch, "metrics": text, **digests.content_digests(model, state)}
        with self._writing() as connection:
            last = _head_under_lease(connection, population, task, epoch)
            is_task = tables.is_task(_COMMITS, population, task)
            row = {
                "population": population,
                "task": task,
                "round": round_index,
                "committed_at": float(now) + 0.0,  # A database may drop the sign of a zero.
                **known,
            }
            digest = digests.round_digest(row, last.digest)
            swap = (
                _COMMITS.update()
                .where(is_task, _COMMITS.c.rounds_done == round_index)
                .values(
                    rounds_done=round_index + 1,
                    model=sql.bindparam("new_model"),
                    state=sql.bindparam("new_state"),
                    digest=digest,
                    attempt="",
                    **known,
                )
            )
            values = {"new_model": _in_row(model), "new_state": _in_row(state)}
            if tables.execute(connection, swap, values).rowcount != 1:
                raise interface.RoundConflict(task, round_index, last.rounds_done)
            _write_pieces(connection, population, task, model=model, state=state)
            tables.execute(connection, _ROUNDS.insert().values(digest=digest, **row))
        kept = self._kept(population, task, state, known["state_digest"])
        return interface.Commit(task, round_index + 1, epoch, model, kept, json_text.parse(text))

    @override
    def history(self, population: str, task: str) -> list[dict[str, Any]]:
        with self._reading() as connection:
            head = _head(connection, tables.HEAD, population, task)
            rows = tables.execute(connection, tables.rounds_of(head)).all()
            digests.check_rounds(head, rows)
        return [
            {
                **{name: getattr(row, name) for name in interface.HISTORY_COLUMNS},
                **json_text.parse(row.metrics),
            }
            for row in rows
        ]

    @override
    def close(self) -> None:
        self._engine.dispose()


class _Pieces(contents.Content):
    """A large model or state, read piece by piece while a transaction lasts."""

    def __init__(self, connection: sql.engine.Connection, row: sql.engine.Row, name: str):
        self._connection, self._name, self._task = connection, name, row.task
        self._is_mine = sql.and_(
            tables.is_task(_PIECES, row.population, row.task), _PIECES.c.content == name
        )
        query = sql.select(_PIECES.c.number, sql.func.length(_PIECES.c.bytes)).where(self._is_mine)
        found = tables.execute(connection, query.order_by(_PIECES.c.number)).all()
        self._sizes = dict(map(tuple, found))

    @override
    def __len__(self) -> int:
        return sum(self._sizes.values())

    @override
    def parts(self) -> Iterator[bytes | memoryview]:
        for number in self._sizes:
            query = sql.select(_PIECES.c.bytes).where(self._is_mine, _PIECES.c.number == number)
            piece = tables.execute(self._connection, query).scalar_one()
            yield _bytes(piece, self._name, self._task)

    @override
    def head(self) -> bytes:
        return contents.head_of(self.parts())


class _StoredState(contents.Content):
    """The state of a commit, in the store until it is read; damage is reported then."""

    def __init__(
        self,
        store: SqlStore,
        population: str,
        task: str,
        digest: str,
        num_bytes: int,
        head: bytes,
    ):
        self._store, self._population, self._task = store, population, task
        self._digest, self._num_bytes, self._head = digest, num_bytes, head

    @override
    def __len__(self) -> int:
        return self._num_bytes

    @override
    def parts(self) -> Iterator[bytes | memoryview]:
        yield self._store.read_state(self._population, self._task, self._digest)

    @override
    def fill(self, buffers: Sequence[memoryview]) -> None:
        self._store.read_state(self._population, self._task, self._digest, buffers)

    @override
    def head(self) -> bytes:
        return self._head


def _content(
    connection: sql.engine.Connection, row: sql.engine.Row, name: str
) -> contents.Serialised:
    """Returns the model or state of a task's last commit: its row's, or the pieces instead."""
    in_row = _bytes(getattr(row, name), name, row.task)
    return in_row if len(in_row) else _Pieces(connection, row, name)


def _bytes(value: Any, name: str, task: str) -> bytes | memoryview:
    """Returns a value of a column of bytes, in which a database may hold others."""
    if not isinstance(value, bytes | memoryview):
        raise digests.DamagedRow(f"the {name} of the task {task!r} is not what was committed")
    # That of psycopg2 has another format, which no buffer takes.
    return value.cast("B") if isinstance(value, memoryview) else value


def _in_row(content: contents.Serialised) -> bytes | memoryview:
    """Returns what a task's row has of a model or state: nothing if it is written in pieces."""
    if len(content) > _PIECE_BYTES:
        return b""
    return bytes(content) if isinstance(content, contents.Content) else content


def _write_pieces(
    connection: sql.engine.Connection, population: str, task: str, **written: contents.Serialised
) -> None:
    """Replaces the pieces of a task's model and state."""
    is_mine = tables.is_task(_PIECES, population, task)
    tables.execute(connection, _PIECES.delete().where(is_mine))
    for name, content in written.items():
        if len(content) <= _PIECE_BYTES:
            continue
        row = {"population": population, "task": task, "content": name}
        parts = contents.parts_of(content)
        for number, piece in enumerate(contents.in_pieces(parts, _PIECE_BYTES, _PIECE_BYTES)):
            values = {**row, "number": number, "bytes": piece}
            tables.execute(connection, _PIECES.insert(), values)


def _head(
    connection: sql.engine.Connection, columns: Iterable[sql.Column], population: str, task: str
) -> sql.engine.Row:
    """Reads some columns of a task's last commit, without a check."""
    query = sql.select(*columns).where(tables.is_task(_COMMITS, population, task))
    row = tables.execute(connection, query).first()
    if row is None:
        raise interface.UnknownTask(population, task)
    return row


def _checked_head(
    connection: sql.engine.Connection, columns: Iterable[sql.Column], population: str, task: str
) -> sql.engine.Row:
    """Reads some columns of a task's last commit, and checks all but model and state."""
    head = _head(connection, columns, population, task)
    digests.check_count(head)
    start = max(head.rounds_done - 2, 0)  # The last round's digest needs that of the round before.
    rows = tables.execute(connection, tables.rounds_of(head, start)).all()
    digests.check_rounds(head, rows, start=start)
    return head


def _head_under_lease(
    connection: sql.engine.Connection, population: str, task: str, epoch: int
) -> sql.engine.Row:
    """Locks the lease, which must have the epoch, and reads a task's last commit, as checked."""
    latest = _locked_lease(connection, population).epoch
    if epoch != latest:
        raise interface.StaleEpoch(population, epoch, latest)
    last = _checked_head(connection, tables.HEAD, population, task)
    digests.check_epoch(last, epoch)
    return last


def _read_lease(
    connection: sql.engine.Connection, population: str, *, lock: bool = False
) -> interface.Lease | None:
    query = sql.select(_LEASES).where(_LEASES.c.population == population)
    row = tables.execute(connection, query.with_for_update() if lock else query).first()
    if row is None:
        return None
    digests.check_lease(row)
    return interface.Lease(row.population, row.owner, row.epoch, row.valid_until)


def _locked_lease(connection: sql.engine.Connection, population: str) -> interface.Lease:
    """Reads the last lease, and locks it until the transaction ends; epoch 0 if there is none."""
    lease = _read_lease(connection, population, lock=True)
    return interface.Lease(population, "", 0, 0.0) if lease is None else lease


def _lease_row(lease: interface.Lease) -> dict[str, Any]:
    valid_until = float(lease.expires_at) + 0.0
    values = {"owner": lease.owner, "epoch": lease.epoch, "valid_until": valid_until}
    digest = digests.lease_digest(lease.population, *values.values())
    return {"population": lease.population, **values, "digest": digest}


def _write_lease(connection: sql.engine.Connection, lease: interface.Lease) -> interface.Lease:
    is_row = _LEASES.c.population == lease.population
    tables.execute(connection, _LEASES.update().where(is_row).values(_lease_row(lease)))
    return lease


def _insert_if_new(
    connection: sql.engine.Connection, table: sql.Table, row: Mapping[str, Any]
) -> bool:
    """Inserts a row unless its key is taken; returns whether it was inserted."""
    try:
        with connection.begin_nested():  # pyright: ignore[reportOptionalContextManager]
            tables.execute(connection, table.insert(), row)
    except exc.IntegrityError:
        return False
    return True
