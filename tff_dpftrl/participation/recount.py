"""Recount of participation from the raw record of a ledger, without its key."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3

import numpy as np

from tff_dpftrl.participation import ledger_file, observed
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Recount:
    """Declared and observed participation of a ledger, with the limits that are exceeded.

    `observed` covers all rounds begun, counted from the raw record; at most one of them is not
    committed.
    """

    declared: schema_lib.MinSep
    observed: observed.ObservedParticipation
    committed_rounds: int
    breaches: tuple[schema_lib.Breach, ...]


def recount(path: str | os.PathLike[str]) -> Recount:
    """Counts participation from the raw record of a ledger that no process has open.

    Its key is not needed. A damaged record is refused.
    """
    with (
        ledger_file.as_os_error(path),
        contextlib.closing(ledger_file.connect(path, exclusive=False)) as connection,
    ):
        damage = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if damage != "ok":
            raise ledger_file.damaged(path, damage)
        row = connection.execute(
            "SELECT num_rounds, min_sep, max_participations FROM declared"
        ).fetchone()
        if row is None:
            raise ledger_file.damaged(path, "it lacks the declared schema")
        declared = schema_lib.MinSep(*row)
        begun = _rounds(connection, "rounds", path)
        committed = _rounds(connection, "commits", path)
        seen = _count(connection, begun, path)
    return Recount(declared, seen, committed, seen.breaches(declared))


def states(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Reads the fingerprints of the initial state and of those after each committed round.

    A copy of the run has the same ones up to the round from which it was continued by itself. The
    ledger's key is not needed; a damaged record is refused.
    """
    with (
        ledger_file.as_os_error(path),
        contextlib.closing(ledger_file.connect(path, exclusive=False)) as connection,
    ):
        _rounds(connection, "commits", path)
        initial = connection.execute("SELECT initial_checkpoint FROM declared").fetchall()
        rows = connection.execute("SELECT checkpoint FROM commits ORDER BY round")
        return tuple(state for (state,) in (*initial, *rows))


def _rounds(connection: sqlite3.Connection, table: str, path: str | os.PathLike[str]) -> int:
    count, last = connection.execute(f"SELECT count(*), max(round) FROM {table}").fetchone()
    if count and last != count - 1:
        raise ledger_file.damaged(path, "rounds are missing")
    return count


def _count(
    connection: sqlite3.Connection, num_rounds: int, path: str | os.PathLike[str]
) -> observed.ObservedParticipation:
    """Counts contributors of committed rounds, and all asked clients of an uncommitted one."""
    num_clients, first, last = connection.execute(
        "SELECT count(*), coalesce(min(client), 1), coalesce(max(client), 0) FROM clients"
    ).fetchone()
    unknown = connection.execute(
        "SELECT 1 FROM asked WHERE client NOT BETWEEN 1 AND ? LIMIT 1", (num_clients,)
    ).fetchone()
    if (first, last) != (1, num_clients) or unknown is not None:
        raise ledger_file.damaged(path, "clients are missing")
    counter = observed.ParticipationCounter(num_clients + 1)
    for t in range(num_rounds):
        counted = connection.execute(
            "SELECT client FROM asked WHERE round = ? "
            "EXCEPT SELECT client FROM dropped WHERE round = ?",
            (t, t),
        )
        counter.add(np.array([client for (client,) in counted], dtype=int))
    return counter.observed
