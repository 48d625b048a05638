"""SQLite file of the ledger: its tables, creation and connection.

Rows of `rounds`, `asked`, `commits` and `dropped` are only ever added; triggers refuse anything
else. `clients` is an index: how often and when each client last took part, up to the last committed
round.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
from collections.abc import Iterator

from tff_dpftrl import durable_files, validation
from tff_dpftrl.participation import schema as schema_lib

_APPLICATION_ID = 0x44504C47  # "DPLG"
_FORMAT = 1

_TABLES = """
CREATE TABLE declared (
  num_rounds INTEGER NOT NULL,
  min_sep INTEGER NOT NULL,            -- stride
  max_participations INTEGER NOT NULL,
  initial_checkpoint TEXT NOT NULL,
  key_check TEXT NOT NULL
);
CREATE TABLE clients (
  client INTEGER PRIMARY KEY,
  pseudonym BLOB NOT NULL UNIQUE,
  participations INTEGER NOT NULL DEFAULT 0,
  last_round INTEGER
);
CREATE TABLE rounds (
  round INTEGER PRIMARY KEY,
  continues_checkpoint TEXT NOT NULL,
  noise_fingerprint TEXT UNIQUE,
  cohort_hash TEXT NOT NULL
);
CREATE TABLE asked (
  round INTEGER NOT NULL,
  client INTEGER NOT NULL,
  PRIMARY KEY (round, client)
) WITHOUT ROWID;
CREATE TABLE commits (
  round INTEGER PRIMARY KEY,
  checkpoint TEXT NOT NULL UNIQUE,
  smallest_stride INTEGER
);
CREATE TABLE dropped (
  round INTEGER NOT NULL,
  client INTEGER NOT NULL,
  PRIMARY KEY (round, client)
) WITHOUT ROWID;
"""
_APPEND_ONLY = ("declared", "rounds", "asked", "commits", "dropped")


def key_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of the key of the ledger at `path`."""
    return pathlib.Path(f"{os.fspath(path)}.key")


def create(
    path: str | os.PathLike[str],
    declared: schema_lib.MinSep,
    initial_checkpoint: str,
    key_check: str,
) -> None:
    """Writes an empty ledger; it appears at `path` complete or not at all.

    Round 0 continues from the state with fingerprint `initial_checkpoint`.
    """
    path = pathlib.Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.with_name(unfinished.name + "-journal").unlink(missing_ok=True)
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    triggers = "".join(
        f"CREATE TRIGGER no_{verb}_{table} BEFORE {verb} ON {table} "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
        for table in _APPEND_ONLY
        for verb in ("update", "delete")
    )
    with (
        as_os_error(path),
        contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as connection,
    ):
        _configure(connection)
        connection.executescript(
            f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_FORMAT};"
            f"BEGIN; {_TABLES} {triggers} COMMIT;"
        )
        connection.execute(
            "INSERT INTO declared VALUES (?, ?, ?, ?, ?)",
            (
                declared.num_rounds,
                declared.min_sep,
                declared.max_participations,
                initial_checkpoint,
                key_check,
            ),
        )
    os.replace(unfinished, path)
    durable_files.sync_folder(path.parent)


def connect(path: str | os.PathLike[str], *, exclusive: bool) -> sqlite3.Connection:
    """Opens a ledger and, if it was interrupted, rolls back the unfinished transaction.

    With `exclusive`, all other processes are locked out until the connection is closed or the
    process ends. The connection is in autocommit mode.
    """
    if not pathlib.Path(path).is_file():
        raise validation.UsageError(
            f"There is no ledger at {path}: create one, or correct the path."
        )
    with as_os_error(path):
        connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        try:
            _configure(connection)
            if exclusive:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("BEGIN EXCLUSIVE")
                connection.execute("COMMIT")
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            connection.close()
            if "locked" in str(error):
                raise validation.UsageError(
                    f"The ledger {path} is in use by another process: two runs on one ledger "
                    "would fork it. Wait for the other one to end, or end it."
                ) from None
            if "not a database" in str(error):
                raise validation.UsageError(f"{path} is not a participation ledger.") from None
            raise
    if (application, version) != (_APPLICATION_ID, _FORMAT):
        connection.close()
        raise validation.UsageError(
            f"{path} is not a participation ledger of format {_FORMAT} "
            f"(application id {application}, format {version})."
        )
    return connection


def has_rounds(path: str | os.PathLike[str]) -> bool:
    """Returns whether a round of a ledger has begun."""
    with as_os_error(path), contextlib.closing(connect(path, exclusive=True)) as connection:
        return connection.execute("SELECT 1 FROM rounds LIMIT 1").fetchone() is not None


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes the changes of a block durable together, or undoes all of them."""
    with as_os_error(path):
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _configure(connection: sqlite3.Connection) -> None:
    # SQLite's default, a rollback journal, keeps the ledger in one file; EXTRA also syncs
    # the directory when the journal is removed: a commit survives a loss of power.
    # The cache, 128 MiB, holds the index of a few million clients.
    connection.executescript(
        "PRAGMA synchronous = EXTRA; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -131072;"
    )


@contextlib.contextmanager
def as_os_error(path: str | os.PathLike[str]) -> Iterator[None]:
    """Converts errors of SQLite to an OSError with a message of one line."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # Words of SQLite's that are no text.
        raise OSError(f"The ledger {path} cannot be used: {_one_line(error)}.") from error


def damaged(path: str | os.PathLike[str], reason: str) -> validation.UsageError:
    """Builds the error for a ledger that does not hold what was written to it."""
    return validation.UsageError(
        f"The ledger {path} is damaged: {_one_line(reason)}. Restore a backup."
    )


def _one_line(reason: object) -> str:
    """Joins the lines of a message of SQLite, which may quote a damaged file."""
    return " ".join(str(reason).split())
