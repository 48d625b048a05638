"""Append-only, crash-safe ledger of participation; every round has to be admitted by it.

The order of one round t is

1. `begin_round(t, cohort, ...)`, before any client runs: refused if it would break
   the declared schema or the budget, or if the training state is not the one last
   committed. The record of the begun round is durable when the call returns.
2. Training, and a durable checkpoint of the new state, noise state included.
3. `commit_round(t, contributed, checkpoint)`: from now on this is *the* state after
   round t. Only then may the model be used or published.

A crash before 3 leaves round t begun, and nothing of it released. It can then only be
repeated from the same checkpoint with the same cohort, which is the one that counts, or
be committed with no contribution. The noise of a repetition is drawn anew.

A committed round counts for the clients that contributed, since only their updates
entered the released sum. A round begun but not committed counts for all clients that
were asked, since their updates may have been used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from tff_dpftrl import durable_files, validation
from tff_dpftrl.participation import ledger_file, observed, pseudonyms
from tff_dpftrl.participation import ledger_rules as rules
from tff_dpftrl.participation import schema as schema_lib

BudgetGuard: TypeAlias = Callable[[observed.ObservedParticipation], str | None]
"""Callback that admits a round: it takes the participation with the round included, and
returns None, or the reason why the round would exceed the budget."""


_OF_OTHER_TYPES = (
    "SELECT 1 FROM commits WHERE coalesce(smallest_stride, 1) < 1 "
    "OR typeof(smallest_stride) NOT IN ('integer', 'null') LIMIT 1",
    "SELECT 1 FROM clients WHERE participations < 0 OR typeof(participations) != 'integer' "
    "OR last_round < 0 OR typeof(last_round) NOT IN ('integer', 'null') LIMIT 1",
)


@dataclasses.dataclass(frozen=True)
class _Cohort:
    """Clients of a round, from the index of the ledger; all of shape [cohort]."""

    pseudonyms: list[bytes]
    participations: np.ndarray
    last_round: np.ndarray  # -1 for never.

    def strides(self, round_index: int) -> np.ndarray:
        return round_index - self.last_round[self.last_round >= 0]

    def only(self, kept: np.ndarray) -> _Cohort:
        chosen = [p for p, keep in zip(self.pseudonyms, kept, strict=True) if keep]
        return _Cohort(chosen, self.participations[kept], self.last_round[kept])


class Ledger:
    """Ledger of one run, held open by one process at a time.

    Fingerprints are strings chosen by the caller. The fingerprint of the noise must be a
    one-way function of the state that a round's noise goes on from, and differ in every round,
    like `NoiseStream.noise_fingerprint`; it is None if there is no noise. The fingerprint of a
    checkpoint must cover the whole training state, round number included.

    Attributes:
      path: File of the ledger; its key is in the file `path` + ".key".
      declared: Participation schema that the run promises.
    """

    def __init__(
        self, path: str | os.PathLike[str], connection: sqlite3.Connection, key_file: pathlib.Path
    ):
        """Internal; use `Ledger.create` or `Ledger.open`."""
        self.path = pathlib.Path(path)
        self._connection = connection
        rows = connection.execute("SELECT * FROM declared").fetchall()
        if [list(map(type, row)) for row in rows] != [[int, int, int, str, str]]:
            raise ledger_file.damaged(path, "it lacks the declared schema")
        self.declared = schema_lib.MinSep(*rows[0][:3])
        self._initial_checkpoint, key_check = rows[0][3:]
        self._pseudonyms = pseudonyms.Pseudonyms.load(key_file)
        if self._pseudonyms.check != key_check:
            raise validation.UsageError(
                f"{key_file} is not the key of the ledger {path}: restore the right key file."
            )
        connection.execute("CREATE TEMP TABLE cohort (pseudonym BLOB PRIMARY KEY) WITHOUT ROWID")
        self._committed = _committed_participation(connection, self.path)
        self._budget_guard: BudgetGuard | None = None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        declared: schema_lib.MinSep,
        *,
        initial_checkpoint: str,
        budget_guard: BudgetGuard | None = None,
    ) -> Ledger:
        """Starts the ledger of a new run.

        Args:
          path: Path of the new file; its folder must exist.
          declared: Participation schema that the run promises.
          initial_checkpoint: Fingerprint of the state that round 0 continues from.
          budget_guard: Callback that is asked before every new round; None for no budget.

        Returns:
          The ledger, open and locked.

        Raises:
          ValueError: If there is a file at `path` already, or another process makes one.
          OSError: If the files cannot be written.
        """
        path = pathlib.Path(path)
        lock = path.with_name(f".{path.name}.unfinished")
        # Two that begin at once would replace each other's key and ledger.
        with durable_files.locked(lock) as is_ours:
            is_new = is_ours and not path.exists()
            if is_new:
                key = pseudonyms.Pseudonyms.create(ledger_file.key_path(path))
                ledger_file.create(path, declared, initial_checkpoint, key.check)
            if is_ours:
                lock.unlink(missing_ok=True)  # Whoever locks a new one finds the ledger.
        if not is_new:
            raise validation.UsageError(
                f"{path} exists already, or another process makes it: open it to resume, or "
                "choose another path."
            )
        return cls.open(path, declared, budget_guard=budget_guard)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        declared: schema_lib.MinSep,
        *,
        budget_guard: BudgetGuard | None = None,
    ) -> Ledger:
        """Opens the ledger of a run to resume it.

        Args:
          path: Path of the ledger's file.
          declared: Participation schema that the run promises now.
          budget_guard: Callback that is asked before every new round; None for no budget.

        Returns:
          The ledger, open and locked.

        Raises:
          ValueError: If there is no ledger, it is in use, its key is missing or wrong,
            or it was started under another schema.
          OSError: If the file cannot be used.
        """
        connection = ledger_file.connect(path, exclusive=True)
        try:
            with ledger_file.as_os_error(path):
                ledger = cls(path, connection, ledger_file.key_path(path))
            if ledger.declared != declared:
                raise validation.UsageError(
                    f"The ledger {path} was started under {ledger.declared}, not {declared}: a "
                    "run cannot change its promise. Resume with the former, or start a new run."
                )
        except BaseException:
            connection.close()
            raise
        ledger._budget_guard = budget_guard
        return ledger

    def close(self) -> None:
        """Closes the file and lets other processes open it."""
        self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def last_committed_round(self) -> int | None:
        """Number of the last committed round; None if there is none."""
        committed = self._committed.num_rounds
        return committed - 1 if committed else None

    @property
    def last_checkpoint(self) -> str:
        """Fingerprint of the only state from which training may continue."""
        if self.last_committed_round is None:
            return self._initial_checkpoint
        return self._value(
            "SELECT checkpoint FROM commits WHERE round = ?", self.last_committed_round
        )

    @property
    def pending_round(self) -> int | None:
        """Number of the round that was begun and not yet committed; None if there is none."""
        next_round = self._committed.num_rounds
        return self._value("SELECT round FROM rounds WHERE round = ?", next_round)

    def observed(self) -> observed.ObservedParticipation:
        """Returns the participation so far; a round begun but not committed counts in full."""
        pending = self.pending_round
        if pending is None:
            return self._committed
        asked = self._asked(pending)
        return self._committed.with_round(asked.participations, asked.strides(pending))

    def begin_round(
        self,
        round_index: int,
        cohort: Iterable[str],
        *,
        noise_fingerprint: str | None,
        checkpoint_fingerprint: str,
    ) -> bool:
        """Records that a round begins, or refuses it; call it before any client runs.

        Args:
          round_index: Number of the round, 0, 1, ...
          cohort: Ids of all users who will be asked.
          noise_fingerprint: Fingerprint of the state that the noise of this round goes on from;
            None if there is no noise.
          checkpoint_fingerprint: Fingerprint of the state that the round continues from.

        Returns:
          Whether this repeats a round that was begun before and never committed.

        Raises:
          rules.ForkRefusal: If the state is not the one last committed.
          rules.ReplayRefusal: If the round was begun before with another cohort, or an earlier
            round went on from the noise state.
          rules.SchemaRefusal: If the round would break the declared schema.
          rules.BudgetRefusal: If the budget guard refuses it.
          ValueError: If a user id is not a string, or appears twice.
          OSError: If the file cannot be written.
        """
        rules.check_position(
            round_index,
            checkpoint_fingerprint,
            next_round=self._committed.num_rounds,
            last_checkpoint=self.last_checkpoint,
            checkpoint_round=self._round_of_checkpoint(checkpoint_fingerprint),
        )
        names = sorted(self._pseudonyms.of(cohort))
        cohort_hash = hashlib.blake2b(b"".join(names), digest_size=32).hexdigest()
        earlier = "SELECT round FROM rounds WHERE noise_fingerprint = ? AND round < ?"
        rules.check_noise_state(round_index, self._value(earlier, noise_fingerprint, round_index))
        if self.pending_round is not None:
            before = self._value("SELECT cohort_hash FROM rounds WHERE round = ?", round_index)
            rules.check_replay(round_index, before, cohort_hash)
            return True
        with ledger_file.transaction(self._connection, self.path):
            members = self._look_up(names)
            strides = members.strides(round_index)
            rules.check_schema(round_index, self.declared, members.participations, strides)
            if self._budget_guard is not None:
                with_round = self._committed.with_round(members.participations, strides)
                reason = self._budget_guard(with_round)
                if reason is not None:
                    raise rules.BudgetRefusal(f"Round {round_index} may not begin: {reason}")
            execute = self._connection.execute
            execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?)",
                (round_index, checkpoint_fingerprint, noise_fingerprint, cohort_hash),
            )
            execute("INSERT OR IGNORE INTO clients (pseudonym) SELECT pseudonym FROM temp.cohort")
            execute(
                "INSERT INTO asked SELECT ?, client FROM temp.cohort "
                "JOIN clients USING (pseudonym) ORDER BY client",
                (round_index,),
            )
        return False

    def commit_round(
        self, round_index: int, contributed: Iterable[str], checkpoint_fingerprint: str
    ) -> None:
        """Makes the state after a round the only one that training may continue from.

        Call it when that state is durable, and before the model is used or published.

        Args:
          round_index: Number of the round that was begun.
          contributed: Ids of the users whose updates entered the sum.
          checkpoint_fingerprint: Fingerprint of the new state.

        Raises:
          rules.LedgerRefusal: If the round is not the one begun, a user contributed without
            having been asked, or the fingerprint is that of an earlier state.
          OSError: If the file cannot be written.
        """
        if self.pending_round is None or round_index != self.pending_round:
            raise rules.LedgerRefusal(
                f"Round {round_index} cannot be committed: the round begun and not committed is "
                f"{self.pending_round}."
            )
        if self._round_of_checkpoint(checkpoint_fingerprint) is not None:
            raise rules.ForkRefusal(
                f"The checkpoint of round {round_index} has the fingerprint of an earlier state: "
                "a fingerprint must cover the round number and the noise state."
            )
        asked = self._asked(round_index)
        names = set(self._pseudonyms.of(contributed))
        kept = np.array([name in names for name in asked.pseudonyms], dtype=bool)
        if np.count_nonzero(kept) != len(names):
            raise rules.LedgerRefusal(
                f"{len(names) - np.count_nonzero(kept)} users contributed to round {round_index} "
                "without having been asked: begin the round with the whole cohort."
            )
        contributors, dropped = asked.only(kept), asked.only(~kept)
        strides = contributors.strides(round_index)
        with ledger_file.transaction(self._connection, self.path):
            self._connection.executemany(
                "INSERT INTO dropped SELECT ?, client FROM clients WHERE pseudonym = ?",
                [(round_index, name) for name in dropped.pseudonyms],
            )
            self._connection.executemany(
                "UPDATE clients SET participations = participations + 1, last_round = ? "
                "WHERE pseudonym = ?",
                [(round_index, name) for name in contributors.pseudonyms],
            )
            self._connection.execute(
                "INSERT INTO commits VALUES (?, ?, ?)",
                (round_index, checkpoint_fingerprint, min(strides.tolist(), default=None)),
            )
        self._committed = self._committed.with_round(contributors.participations, strides)

    def _look_up(self, names: list[bytes]) -> _Cohort:
        """Reads the index entries of pseudonyms, which may be new; fills temp.cohort."""
        self._connection.execute("DELETE FROM temp.cohort")
        self._connection.executemany(
            "INSERT INTO temp.cohort VALUES (?)", [(name,) for name in names]
        )
        return _as_cohort(
            self._connection.execute(
                "SELECT pseudonym, coalesce(participations, 0), coalesce(last_round, -1) "
                "FROM temp.cohort LEFT JOIN clients USING (pseudonym)"
            )
        )

    def _asked(self, round_index: int) -> _Cohort:
        with ledger_file.as_os_error(self.path):
            return _as_cohort(
                self._connection.execute(
                    "SELECT pseudonym, participations, coalesce(last_round, -1) "
                    "FROM asked JOIN clients USING (client) WHERE round = ?",
                    (round_index,),
                )
            )

    def _round_of_checkpoint(self, checkpoint: str) -> int | None:
        """Returns the round that would continue from a checkpoint; None if it is unknown."""
        if checkpoint == self._initial_checkpoint:
            return 0
        return self._value("SELECT round + 1 FROM commits WHERE checkpoint = ?", checkpoint)

    def _value(self, query: str, *parameters: object) -> Any:
        """Returns the first value that a query gives; None if it gives none."""
        with ledger_file.as_os_error(self.path):
            row = self._connection.execute(query, parameters).fetchone()
        return None if row is None else row[0]


def _as_cohort(rows: sqlite3.Cursor) -> _Cohort:
    names, participations, last_round = tuple(zip(*rows, strict=True)) or ((), (), ())
    return _Cohort(list(names), np.array(participations, int), np.array(last_round, int))


def _committed_participation(
    connection: sqlite3.Connection, path: pathlib.Path
) -> observed.ObservedParticipation:
    for query in _OF_OTHER_TYPES:  # SQLite keeps any type in any column.
        if connection.execute(query).fetchone() is not None:
            raise ledger_file.damaged(path, "a number of rounds is none")
    num_rounds, min_sep = connection.execute(
        "SELECT count(*), min(smallest_stride) FROM commits"
    ).fetchone()
    histogram = dict(
        connection.execute(
            "SELECT participations, count(*) FROM clients WHERE participations > 0 GROUP BY 1"
        )
    )
    return observed.ObservedParticipation(num_rounds, min_sep, max(histogram, default=0), histogram)
