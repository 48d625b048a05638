"""A PostgreSQL server of the tests' own: on loopback, behind a password, and gone after them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest

_PROGRAMS = "/usr/lib/postgresql/*/bin"  # Of Debian, which does not put them on PATH.
_SECONDS = 60.0  # For what takes two, on a machine that does other things.
_PR_SET_PDEATHSIG = 1


class Server:
    """A server in a temporary folder, run as somebody who may do nothing else.

    Attributes:
      port: Where it listens, on loopback; the same after a restart.
      password: Of its only user, "tests".
    """

    def __init__(self, programs: pathlib.Path, *settings: str):
        """Makes a folder of databases and starts the server on it.

        Args:
          programs: Where `initdb` and `postgres` are.
          *settings: More of them, like "fsync=off".
        """
        self._programs = programs
        self._settings = settings
        # Not in pytest's folder, which nobody else may enter; it is short, for sockets' names.
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="tff_dpftrl_postgresql_"))
        self._as: dict[str, object] = {}
        if os.getuid() == 0:  # As whom the programs refuse to run.
            nobody = pwd.getpwnam("nobody")
            try:
                os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
            except OSError:  # In a sandbox that knows one user only.
                shutil.rmtree(self._folder)
                pytest.skip("PostgreSQL does not run as root, and nobody else can be here")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.password = secrets.token_hex(16)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        password_file = self._folder / "password"
        password_file.write_text(self.password)
        password_file.chmod(0o644)  # In a folder of 0700.
        subprocess.run(
            [programs / "initdb", "--no-sync", "--username=tests", f"--pwfile={password_file}"]
            + ["--auth=scram-sha-256", "--locale=C", "--encoding=UTF8", self._folder / "data"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
            **self._as,
        )
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers; its folder is as it was left."""
        self._launch()
        until = time.monotonic() + _SECONDS
        while True:
            try:
                self.connect().close()
                return
            except _driver().OperationalError:
                if time.monotonic() > until:
                    raise AssertionError(self.log()) from None
            time.sleep(0.02)
            if self._process.poll() is not None:  # What a killed one has left may still run.
                self._launch()

    def _launch(self) -> None:
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", "shared_buffers=16MB"]
        settings += [f"unix_socket_directories={self._folder}", *self._settings]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data"]
                + [part for setting in settings for part in ("-c", setting)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                preexec_fn=_die_with_parent,
                **self._as,
            )

    def kill(self) -> None:
        """Ends it and all that it has started with SIGKILL, as a machine that loses power does."""
        pid = self._process.pid
        self._process.send_signal(signal.SIGSTOP)  # It starts no more.
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._process.kill()
        # Left to themselves they would answer on for a moment.
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ends it, with all connections, and removes its folder; nothing happens twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None
            shutil.rmtree(self._folder)

    def url(self, database: str = "postgres") -> str:
        """The URL of a database, as a store takes it; with the password."""
        return f"postgresql://tests:{self.password}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Makes an empty database; returns its URL."""
        name = f"tests_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def connect(self, database: str = "postgres"):
        """A connection of the driver, which commits every statement by itself."""
        connection = _driver().connect(self.url(database))
        connection.autocommit = True
        return connection

    def execute(self, statement: str, *values: object) -> list[tuple]:
        """Runs a statement in the server's own database; returns its rows, if it has any."""
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def copy_files(self, url: str, folder: pathlib.Path) -> None:
        """Copies what a database has on disk, its tables and the logs, into a new folder."""
        name = url.rpartition("/")[2]
        ((number,),) = self.execute("SELECT oid FROM pg_database WHERE datname = %s", name)
        self.execute("CHECKPOINT")
        for part in (f"base/{number}", "pg_wal"):
            with contextlib.suppress(shutil.Error):  # Of files that are gone meanwhile.
                shutil.copytree(self._folder / "data" / part, folder / part)
        shutil.copyfile(self._folder / "log", folder / "log")

    def log(self) -> str:
        """What it has logged."""
        return (self._folder / "log").read_text(errors="replace")


def programs() -> pathlib.Path:
    """Where the newest PostgreSQL of this machine is; skips the test if there is none."""
    pytest.importorskip("psycopg2", reason="needs psycopg2: pip install 'tff_dpftrl[postgresql]'")
    folders = sorted(pathlib.Path("/").glob(f"{_PROGRAMS[1:]}/postgres"), key=_version)
    on_path = shutil.which("initdb")
    if folders:
        return folders[-1].parent
    if on_path is None:
        pytest.skip("needs PostgreSQL's server: apt-get install postgresql")
    return pathlib.Path(on_path).parent


def _version(program: pathlib.Path) -> float:
    return float(program.parts[-3])


@functools.cache
def _driver():
    import psycopg2

    return psycopg2


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


@functools.cache
def _shared(programs: pathlib.Path) -> Server:
    return Server(programs, "fsync=off")  # A killed process needs no fsync.


@pytest.fixture(scope="session")
def server():
    """One server for all tests of the process; a test that kills it must start it again."""
    shared = _shared(programs())
    yield shared
    shared.stop()
