"""SQLite files of a device: for the owner only, whole after a crash, shared by processes.

They keep SQLite's rollback journal and do without its write-ahead log: what is deleted from
the database would stay readable in the log until a checkpoint, which any reader can hold up.
A journal is gone when its transaction is. Readers in turn wait for writers, which here are
never long about it. Nothing is spilled to temporary files.
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
# A transaction that has ended survives a loss of power, and so does its journal's end.
_SYNCHRONOUS = "EXTRA"
# POSIX drops a process's locks on a file when it closes any descriptor of it: nobody may
# open a database while `_create_file` has one.
_opening = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
      name: What messages call it, with its article: "an example store".
      application_id: SQLite's mark of the kind, a positive 32-bit integer.
      version: Number of the format, from 1.
      tables: Statements that make an empty one, a semicolon at the end of a line between
        them and nowhere else.
      if_damaged: What to do about a damaged one, a sentence.
    """

    name: str
    application_id: int
    version: int
    tables: str
    if_damaged: str


class PrivateDatabase:
    """An open file. Threads may share it; a forked process must open it anew."""

    def __init__(self, path: pathlib.Path, kind: Kind, connection: sqlite3.Connection):
        """Internal; use `PrivateDatabase.open`."""
        self.path = path
        self._kind = kind
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], kind: Kind) -> PrivateDatabase:
        """Opens a file, or makes it if it is missing; sets its mode to 0600.

        Args:
          path: The file; its folder must exist.
          kind: What it should be.

        Returns:
          The file, open.

        Raises:
          ValueError: If it is a file of another kind or format, or damaged.
          OSError: If it cannot be used.
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
        """Reads the whole file to see whether its structure is sound.

        Raises:
          ValueError: If the file is damaged.
          OSError: If it cannot be used.
        """
        [first, *_] = self.read("PRAGMA quick_check(1)")
        if first != ("ok",):
            raise self.damaged(str(first[0]))

    def damaged(self, reason: str) -> ValueError:
        """What to raise if the file holds something else than it should.

        Args:
          reason: What, a few words.
        """
        return ValueError(_damaged(self.path, self._kind, reason))

    def read(self, query: str, *parameters: object) -> list[tuple]:
        """Answers a query, at one moment of the file.

        Args:
          query: A SELECT.
          *parameters: Its values.

        Returns:
          The rows.

        Raises:
          ValueError: If the file is damaged.
          OSError: If it cannot be used.
        """
        with self._lock, _explaining(self.path, self._kind):
            return self._connection.execute(query, parameters).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Makes what is done within durable as a whole, or undoes all of it.

        Others can neither write nor begin to meanwhile: what was read within still holds at
        the end.

        Yields:
          The connection.

        Raises:
          ValueError: If the file is damaged.
          OSError: If it cannot be used, for instance because the disk is full.
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
        """Writes the file anew from what is in it: nothing deleted is left in its bytes.

        SQLite's `secure_delete` overwrites a deleted row where it lies, but not the copies
        of it that moving rows between pages has left in their unused parts.

        Raises:
          ValueError: If the file is damaged.
          OSError: If it cannot be used.
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
                # Another process may have been first; a database with tables is somebody else's.
                is_new = not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
                if self._marks() == (0, 0) and is_new:
                    for statement in self._kind.tables.split(";\n"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {self._kind.application_id}")
                    connection.execute(f"PRAGMA user_version = {self._kind.version}")
        application_id, version = self._marks()
        if application_id != self._kind.application_id:
            raise validation.UsageError(f"{self.path} is not {self._kind.name}: name another file.")
        if version != self._kind.version:
            raise validation.UsageError(
                f"{self.path} is {self._kind.name} of format {version}, and this version knows "
                f"format {self._kind.version}: update the software, or name another file."
            )
        # Nothing before this line changes somebody else's file.
        self._connection.execute("PRAGMA journal_mode = DELETE")
        if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
            self.path.chmod(0o600)

    def _marks(self) -> tuple[int, int]:
        return tuple(
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )


def _create_file(path: pathlib.Path, kind: Kind) -> None:
    """Makes a file of mode 0600 if there is none."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        durable_files.sync_folder(path.parent)
    except FileExistsError:
        if not path.is_file():
            raise validation.UsageError(f"{path} is not {kind.name} but no file at all.") from None
    except FileNotFoundError:
        raise validation.UsageError(
            f"{path} cannot be made: there is no folder {path.parent}. Make it first."
        ) from None


def _damaged(path: pathlib.Path, kind: Kind, reason: str) -> str:
    return f"{path}, {kind.name}, is damaged ({' '.join(reason.split())}). {kind.if_damaged}"


@contextlib.contextmanager
def _explaining(path: pathlib.Path, kind: Kind) -> Iterator[None]:
    try:
        yield
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
