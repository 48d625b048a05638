"""Ledger of the noise that a party has given for one task: one SQLite file.

The noise of a round is a row of the strategy. Each row is given to one attempt only: if two sums
had the same noise, their difference would be a sum without noise. So a row is written here,
durably, before anything of it is sent. An attempt that fails later has used its row up. Rows are
given in increasing order. A row that is passed over is never given.

A copy of the file, or an older one from a backup, does not know of later rows. It gives other noise
in their place: each attempt draws fresh bits, which are written with the row. The seed of a row's
new draws is the ledger's seed XOR these bits. Rows that are passed over have the bits of the next
row that is given.
"""

from __future__ import annotations

import dataclasses
import os
import secrets

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import private_database

SEED_BYTES = 32
"""Size of a ledger's seed and of an attempt's fresh bits, which the operating system draws."""

SENT = "sent"
"""Outcome of a row that was given, before the server has reported another one."""
SUMMED = "summed"
"""Outcome of a row that is in the sum of an attempt."""

_KIND = private_database.Kind(
    name="a noise party's ledger",
    application_id=0x44504E50,  # "DPNP"
    version=2,
    tables="""CREATE TABLE task (
  only INTEGER PRIMARY KEY CHECK (only = 0),
  task TEXT NOT NULL,
  terms TEXT NOT NULL,                 -- SHA-256 of the privacy terms
  seed BLOB NOT NULL
);
CREATE TABLE given (
  row INTEGER PRIMARY KEY,             -- index of the round
  attempt TEXT NOT NULL UNIQUE,
  session BLOB NOT NULL UNIQUE,
  clip_norm REAL,                      -- that devices clip to, where it is learned
  devices INTEGER NOT NULL,            -- in the sum, as the server has named them
  time REAL NOT NULL,                  -- seconds since 1970, by the clock of that moment
  outcome TEXT NOT NULL,
  entropy BLOB NOT NULL                -- fresh bits of the attempt, secret
)""",
    if_damaged="This party no longer knows which noise it has given, and must not go on: the task "
    "has to be made anew, with a new key of the party.",
    # The new draws of earlier rows have the seed of the ledger alone.
    upgrade=f"ALTER TABLE given ADD COLUMN entropy BLOB NOT NULL DEFAULT x'{'00' * SEED_BYTES}'",
)
_COLUMNS = "row, attempt, session, clip_norm, devices, time, entropy, outcome"


class NoiseRefusedError(Exception):
    """Raised where a server asks for noise that must not be given; the message says why."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Noise of one round that was given."""

    row: int
    attempt: str  # Name of the attempt that got it.
    session: bytes  # Session of the secure sum.
    clip_norm: float | None  # L2 norm that devices of the attempt clip to; None if it is fixed.
    devices: int  # Number of devices in the sum, as the server has named them.
    time: float  # Time in seconds since 1970.
    # `SEED_BYTES` fresh bytes that its new draws come from. Secret.
    entropy: bytes = dataclasses.field(repr=False)
    outcome: str = SENT  # `SENT`, `SUMMED`, or the server's reason for refusing the noise.


class Ledger:
    """Ledger of one task. Processes may share the file; still a row is given once."""

    def __init__(self, database: private_database.PrivateDatabase, most_skipped: int):
        """Internal; use `Ledger.open`."""
        self._database = database
        self._most_skipped = most_skipped

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], task: str, terms: str, *, most_skipped: int = 100
    ) -> Ledger:
        """Opens the ledger of a task, or makes it with a new seed; the folder must exist.

        `terms` is the SHA-256 of the task's privacy terms. A request may pass over `most_skipped`
        rows at most. It raises ValueError if the file is of another task, damaged, or no ledger.
        """
        validation.integer("most_skipped", most_skipped, minimum=0)
        database = private_database.PrivateDatabase.open(path, _KIND)
        try:
            with database.transaction() as connection:
                connection.execute(
                    "INSERT OR IGNORE INTO task VALUES (0, ?, ?, ?)",
                    (task, terms, secrets.token_bytes(SEED_BYTES)),
                )
            made = cls(database, most_skipped)
            if made.task != (task, terms):
                name, other = made.task
                raise validation.UsageError(
                    f"{path} is the ledger of the task {name!r} with the terms {other[:16]}, and "
                    f"this is {task!r} with {terms[:16]}: name another folder."
                )
        except BaseException:
            database.close()
            raise
        return made

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """Opens an existing ledger to look at it; raises ValueError if it is damaged, or none."""
        return cls(private_database.PrivateDatabase.open(path, _KIND), 0)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    @property
    def task(self) -> tuple[str, str]:
        """Name of the task, and SHA-256 of its terms."""
        [names] = self._database.read("SELECT task, terms FROM task")
        return names

    def seed(self, entropy: bytes = bytes(SEED_BYTES)) -> np.ndarray:
        """Returns the seed of the ledger joined with fresh bits, int64, shape [4]. Secret."""
        [(seed,)] = self._database.read("SELECT seed FROM task")
        words = np.frombuffer(seed, "<i8") ^ np.frombuffer(entropy, "<i8")
        return words.astype(np.int64)

    def root(self, row: int) -> np.ndarray:
        """Returns the seed of a row's new draws, int64, shape [4]. Secret.

        The row must be before `next_row`.
        """
        [(entropy,)] = self._database.read(
            "SELECT entropy FROM given WHERE row >= ? ORDER BY row LIMIT 1", row
        )
        return self.seed(entropy)

    @property
    def next_row(self) -> int:
        """Index of the first row that may be given: those before are given or passed over."""
        [(last,)] = self._database.read("SELECT MAX(row) FROM given")
        return 0 if last is None else last + 1

    def given(self) -> list[Given]:
        """Returns all rows that were given, in their order."""
        rows = self._database.read(f"SELECT {_COLUMNS} FROM given ORDER BY row")
        return [Given(*row) for row in rows]

    def last(self) -> Given | None:
        """Returns the row that was given last; None if none was."""
        rows = self._database.read(f"SELECT {_COLUMNS} FROM given ORDER BY row DESC LIMIT 1")
        return Given(*rows[0]) if rows else None

    def check(self, row: int, attempt: str, session: bytes) -> None:
        """Raises `NoiseRefusedError` for a row that must not be given to an attempt.

        A row is refused if it, or a later one, was given, if the attempt or the session has had a
        row, or if more rows than allowed would be passed over.
        """
        known = self._database.read(
            "SELECT row FROM given WHERE attempt = ? OR session = ?", attempt, session
        )
        if known:
            raise NoiseRefusedError(
                f"the attempt {attempt!r}, or its session, has had the noise of round "
                f"{known[0][0]}: an attempt gets noise once."
            )
        first = self.next_row
        if row < first:
            raise NoiseRefusedError(
                f"the noise of round {row} was given, or passed over: the next one is that of "
                f"round {first}, and the server has to go on there."
            )
        if row - first > self._most_skipped:
            raise NoiseRefusedError(
                f"round {row} would pass over the noise of {row - first} rounds from {first} on, "
                f"and at most {self._most_skipped} may be: ask the server's operator what became "
                "of them, and raise --most-skipped."
            )

    def give(self, given: Given, first: int) -> None:
        """Writes, durably, that a row is given. Only then may anything of it be sent.

        `first` is `next_row` before the row's noise was drawn, which depends on the rows before. It
        raises NoiseRefusedError if `check` refuses the row, or one was given since. If it raises
        OSError, the row could not be written, and nothing may be sent.
        """
        with self._database.transaction() as connection:  # Nobody else writes meanwhile.
            self.check(given.row, given.attempt, given.session)
            if self.next_row != first:
                raise NoiseRefusedError(
                    f"another process has given the noise of round {self.next_row - 1} meanwhile: "
                    "run one process with this ledger."
                )
            connection.execute(
                f"INSERT INTO given ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                dataclasses.astuple(given),
            )

    def note(self, row: int, outcome: str) -> None:
        """Notes the outcome of a given row: `SUMMED`, or the server's reason for refusing it."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE given SET outcome = ? WHERE row = ?", (outcome, row))
