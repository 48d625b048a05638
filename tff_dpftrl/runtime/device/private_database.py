"""SQLite files of a device: readable by the owner only, crash-safe, shared by processes.

They use SQLite's rollback journal rather than its write-ahead log. Deleted rows would stay
readable in the log until a checkpoint, which any reader can delay; a journal is deleted with
its transaction. In return readers wait for writers, whose transactions are short here. No
temporary files are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sqlite3
import stat
import threading
from collections.abc import Iterator

from tff_dpftrl import durable_files, validation

_BUSY_S = 30.0
# A committed transaction survives a loss of power, and so does the deletion of its journal.
_SYNCHRONOUS = "EXTRA"
# POSIX drops a process's locks on a file when it closes any descriptor of it: no thread may
# open a database while `_create_file` has one.
_opening = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A file format."""

    name: str  # Name of the format in messages, with its article, such as "an example store".
    application_id: int  # SQLite's application id of the format, a positive 32-bit integer.
    version: int  # Version of the format, from 1.
    # SQL statements that create the empty tables. A semicolon at the end of a line separates them;
    # there must be none elsewhere.
    tables: str
    if_damaged: str  # Advice for a damaged file, one sentence.
    # SQL statement that brings the tables of the version before to this one; a file of that version
    # is refused if it is empty.
    upgrade: str = ""


class PrivateDatabase:
    """An open file. Threads may share it; a forked process must open it again."""

    def __init__(self, path: pathlib.Path, kind: Kind, connection: sqlite3.Connection):
        """Internal; use `PrivateDatabase.open`."""
        self.path = path
        self._kind = kind
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], kind: Kind) -> PrivateDatabase:
        """Opens a file, or creates it if it is missing; sets its mode to 0600.

        It raises ValueError if the file is damaged, or has another format or version.
        """
        path = pathlib.Path(path)
        with _explaining(path, kind):
            with _opening:
                _create_file(path, kind)
                connection = sqlite3.connect(
                    path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
                )
            try:
                database = cls(path, kind, connection)
                database._prepare()
            except BaseException:
                connection.close()
                raise
        return database

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def check(self) -> None:
        """Checks the structure of the whole file; raises ValueError if it is damaged."""
        [first, *_] = self.read("PRAGMA quick_check(1)")
        if first != ("ok",):
            raise self.damaged(str(first[0]))

    def damaged(self, reason: str) -> validation.UsageError:
        """Creates the exception for unexpected content."""
        return validation.UsageError(_damaged(self.path, self._kind, reason))

    def read(self, query: str, *parameters: object) -> list[tuple]:
        """Returns all rows of a SELECT on a consistent snapshot of the file."""
        with self._lock, _explaining(self.path, self._kind):
            return self._connection.execute(query, parameters).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs the block as one durable transaction, which is rolled back if the block raises.

        No other connection can write in the meantime: rows read in the block stay valid to its end.
        It raises OSError if the file cannot be used, for instance because the disk is full.
        """
        with self._lock, _explaining(self.path, self._kind):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rewrite(self) -> None:
        """Rewrites the file, so that no bytes of deleted rows are left in it.

        SQLite's `secure_delete` overwrites a deleted row, but not copies of the row in the unused
        parts of pages from which it was moved.
        """
        with self._lock, _explaining(self.path, self._kind):
            self._connection.execute("VACUUM")

    def _prepare(self) -> None:
        self._connection.executescript(
            "PRAGMA secure_delete = ON; PRAGMA temp_store = MEMORY;"
            f"PRAGMA synchronous = {_SYNCHRONOUS};"
        )
        if self._marks() == (0, 0):
            with self.transaction() as connection:
                # Another process may have been first; a database with tables is another program's.
                is_new = not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
                if self._marks() == (0, 0) and is_new:
                    for statement in self._kind.tables.split(";\n"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {self._kind.application_id}")
                    connection.execute(f"PRAGMA user_version = {self._kind.version}")
        application_id, version = self._marks()
        if application_id != self._kind.application_id:
            raise validation.UsageError(f"{self.path} is not {self._kind.name}: name another file.")
        if self._kind.upgrade and version == self._kind.version - 1:
            with self.transaction() as connection:
                if self._marks()[1] == version:  # Another process may have been first.
                    connection.execute(self._kind.upgrade)
                    connection.execute(f"PRAGMA user_version = {self._kind.version}")
            version = self._kind.version
        if version != self._kind.version:
            raise validation.UsageError(
                f"{self.path} is {self._kind.name} of format {version}, and this version knows "
                f"format {self._kind.version}: update the software, or name another file."
            )
        # Nothing before this line changes another program's file.
        self._connection.execute("PRAGMA journal_mode = DELETE")
        if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
            self.path.chmod(0o600)

    def _marks(self) -> tuple[int, int]:
        return tuple(
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )


def _create_file(path: pathlib.Path, kind: Kind) -> None:
    """Creates a file of mode 0600 if there is none."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        durable_files.sync_folder(path.parent)
    except FileExistsError:
        if not path.is_file():
            raise validation.UsageError(
                f"{path} is not {kind.name}, and not a file: name another path."
            ) from None
    except FileNotFoundError:
        raise validation.UsageError(
            f"{path} cannot be created: there is no folder {path.parent}. Create it first."
        ) from None


def _damaged(path: pathlib.Path, kind: Kind, reason: str) -> str:
    return f"{path}, {kind.name}, is damaged ({' '.join(reason.split())}). {kind.if_damaged}"


@contextlib.contextmanager
def _explaining(path: pathlib.Path, kind: Kind) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite quotes a damaged schema, which is no text.
        raise validation.UsageError(_damaged(path, kind, str(error))) from error
    except sqlite3.Error as error:
        reason = str(error)
        if "not a database" in reason:
            raise validation.UsageError(f"{path} is not {kind.name}: name another file.") from error
        if "malformed" in reason:
            raise validation.UsageError(_damaged(path, kind, reason)) from error
        if "locked" in reason:
            raise OSError(
                f"{path}, {kind.name}, was in use by others for {_BUSY_S:.0f} s: end the program "
                "that holds it."
            ) from error
        raise OSError(f"{path}, {kind.name}, cannot be used: {reason}.") from error
