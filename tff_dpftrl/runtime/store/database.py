"""Opening of the database of a store, and its protection.

SQLite is the default: a folder that only its owner may enter, with one file that only its owner
may read. A URL names PostgreSQL, or another database in which SQLAlchemy can lock rows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sql
from sqlalchemy import event, exc, pool

from tff_dpftrl import validation
from tff_dpftrl.runtime import private_files
from tff_dpftrl.runtime.store import checks, digests, interface, migration, tables

_logger = logging.getLogger(__name__)

_PACKAGES = {"psycopg2": "psycopg2-binary"}  # Packages that install without a compiler.
_FILE = "store.sqlite"
_FORMAT = 4  # Version of the tables in `tables`, written to each store.
_FORMAT_WITHOUT_DIGESTS = 1
_FORMAT_WITHOUT_PIECES = 2
_FORMAT_WITHOUT_ATTEMPTS = 3
_OLDER = (_FORMAT_WITHOUT_DIGESTS, _FORMAT_WITHOUT_PIECES, _FORMAT_WITHOUT_ATTEMPTS)
_TEXT_IS_DAMAGED = "a text in it is damaged"
_SQLITE_CORRUPT = 11  # `sqlite3.SQLITE_CORRUPT`, which Python 3.10 does not name.
_BUSY_SECONDS = 30  # Seconds that a transaction waits for one of another process.
_BETWEEN_TRIES = 0.01  # Seconds.
_READS = "tff_dpftrl_reads"  # Option of connections to SQLite that only read.
# Time-outs that detect a connection whose other end is gone.
_NETWORK = {
    "connect_timeout": 10,  # Seconds.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,  # Milliseconds.
}
_LIBPQ_DRIVERS = ("psycopg", "psycopg2")
_SECRET_OPTIONS = ("password", "sslpassword")
# PostgreSQL's log quotes statements with their values, the seed of the noise among them. By
# default, it quotes statements that fail.
_UNLOGGED = {
    "log_min_error_statement": "panic",
    "log_statement": "none",
    "log_min_duration_statement": "-1",
}


@contextlib.contextmanager
def one_line_errors(action: str) -> Iterator[None]:
    """Turns the database's errors into a `StoreError` of one line, without written values.

    `action` describes what was done, like "write to the store at /data/store".
    """
    try:
        yield
    except exc.SQLAlchemyError as error:
        # Never str(error), which quotes the parameters of the statement: models and seeds.
        origin = getattr(error, "orig", None)
        lines = str(origin).strip().splitlines() if origin is not None else []
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        # Nor the text in a damaged column.
        reason, is_quoted, _ = reason.partition(" with text ")
        is_damaged = is_quoted or _is_corrupt(origin)
        if type(origin) is sqlite3.DatabaseError and not lines:
            # Python 3.10 has no words for SQLite's error that is no text.
            reason, is_damaged = _TEXT_IS_DAMAGED, True
    except OverflowError:  # A number from a damaged file was written back to it.
        reason, is_damaged = "a number in it is too large", True
    except UnicodeDecodeError:  # The file is damaged so that SQLite's error is no text.
        reason, is_damaged = _TEXT_IS_DAMAGED, True
    else:
        return
    advice = f" {interface.backup_advice({})}" if is_damaged else ""
    raise interface.StoreError(f"Cannot {action}: {reason}.{advice}")


def _is_corrupt(error: BaseException | None) -> bool:
    """Returns whether SQLite reports a damaged file, rather than a file of another kind."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # Python 3.10.
        return isinstance(error, sqlite3.DatabaseError) and "malformed" in str(error)
    return code & 0xFF == _SQLITE_CORRUPT


def open_database(place: str | os.PathLike[str]) -> tuple[sql.engine.Engine, str]:
    """Opens the database of a store, and makes its tables where there are none.

    The place is a folder for SQLite, made if it is missing, or a URL like
    "postgresql://user@host/name". Returns the engine, and the name of the place for messages,
    without a password. Raises StoreError if the place cannot be made, reached or written, holds
    something else, or is damaged.
    """
    place = os.fspath(place)
    engine, name = _by_url(place) if "://" in place else _in_folder(pathlib.Path(place))
    try:
        with one_line_errors(f"open the store at {name}"):
            try:
                _prepare_tables(engine, name)
            except (exc.IntegrityError, exc.ProgrammingError):
                _prepare_tables(engine, name)  # Another process made them at the same time.
        if engine.dialect.name == "postgresql":
            with one_line_errors(f"read the store at {name}"):
                _warn_of_log(engine, name)
    except BaseException:
        engine.dispose()
        raise
    return engine, name


def for_reading(engine: sql.engine.Engine) -> sql.engine.Engine:
    """Returns an engine whose transactions read one state of the database, and lock nothing."""
    if engine.dialect.name == "sqlite":
        return engine.execution_options(**{_READS: True})
    return engine.execution_options(isolation_level="REPEATABLE READ")


def _warn_of_log(engine: sql.engine.Engine, name: str) -> None:
    """Warns if the database's log is going to quote what is written to the store."""
    with engine.begin() as connection:
        query = sql.text("SELECT current_setting('log_min_error_statement'), current_user")
        [(level, user)] = tables.execute(connection, query).all()
    if level != _UNLOGGED["log_min_error_statement"]:
        _logger.warning(
            "The log of the database of %s quotes statements that fail, with the seed of the "
            'noise: have a superuser run ALTER ROLE "%s" SET log_min_error_statement = panic.',
            name,
            user,
        )


def _prepare_tables(engine: sql.engine.Engine, name: str) -> None:
    """Makes the tables where there are none, brings old ones up to date, and checks all rows."""
    with engine.begin() as connection, checks.damage_reported(connection, name):
        checks.check_file(connection)
        if not _has_tables(connection):
            tables.METADATA.create_all(connection, checkfirst=False)
            tables.execute(connection, tables.FORMAT.insert().values(version=_FORMAT))
            return
        query = sql.select(tables.FORMAT.c.version)
        version = tables.execute(connection, query).scalar()
        if version in _OLDER:
            # Another process may have been faster.
            version = tables.execute(connection, query.with_for_update()).scalar()
            if version in _OLDER:
                migration.add_attempts(connection)
                if version == _FORMAT_WITHOUT_DIGESTS:
                    migration.add_digests(connection)
                elif version == _FORMAT_WITHOUT_PIECES:
                    migration.rename_end_of_leases(connection)
                if version != _FORMAT_WITHOUT_ATTEMPTS:
                    tables.PIECES.create(connection)
                tables.execute(connection, tables.FORMAT.update().values(version=_FORMAT))
                version = _FORMAT
        if version is None:
            raise digests.DamagedRow("it has lost the number of its format")
        if version != _FORMAT:
            raise interface.StoreError(
                f"The store at {name} has format {version}, this version reads format {_FORMAT}: "
                "use the version of this package that wrote it."
            )
        if not connection.dialect.has_table(connection, tables.PIECES.name):
            raise digests.DamagedRow(f"it has lost the tables {[tables.PIECES.name]}")
        checks.check_rows(connection)


def _has_tables(connection: sql.engine.Connection) -> bool:
    """Returns whether the database has the tables; one transaction makes all of them."""

    def has(table: sql.Table) -> bool:
        return connection.dialect.has_table(connection, table.name)

    # A store of an older format has no pieces.
    newer = (tables.FORMAT, tables.PIECES)
    others = [table for table in tables.METADATA.sorted_tables if table not in newer]
    has_others = any(map(has, others))  # Asked first: another process may make them meanwhile.
    if has(tables.FORMAT):
        lost = [table.name for table in others if not has(table)]
    elif has_others:
        lost = [tables.FORMAT.name]
    else:
        return False
    if lost:
        raise digests.DamagedRow(f"it has lost the tables {lost}")
    return True


def _use_wal(connection: sqlite3.Connection) -> None:
    """Sets the journal mode; SQLite does not wait for another process that sets it too."""
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(_BETWEEN_TRIES)


def _in_folder(folder: pathlib.Path) -> tuple[sql.engine.Engine, str]:
    path = folder / _FILE
    try:
        private_files.make_folder(folder)
        # SQLite gives its other files (-wal, -shm) the mode of this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise interface.StoreError(
            f"Cannot write to the store at {folder}: {error.strerror}. Name a folder that you may "
            "write to."
        ) from None
    engine = sql.create_engine(
        sql.engine.URL.create("sqlite", database=str(path)),
        poolclass=pool.QueuePool,
        # A cached statement would keep the model and the state that were committed with it.
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False, "cached_statements": 0},
        hide_parameters=True,
        future=True,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection, _):
        connection.isolation_level = None  # The driver begins no transaction by itself.
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection):
        # Taking the write lock at once keeps what the transaction reads true until it writes. A
        # reader of a large state would keep the lease from being renewed.
        only_reads = connection.get_execution_options().get(_READS)
        connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")

    return engine, str(folder)


def has_password(url: str) -> bool:
    """Returns whether a database URL holds a password, as such or as an option."""
    read = _read_url(url)
    return bool(read.password) or any(name in read.query for name in _SECRET_OPTIONS)


def _read_url(text: str) -> sql.engine.URL:
    try:
        url: Any = sql.engine.make_url(text)
    except (exc.ArgumentError, ValueError):
        raise validation.UsageError(
            "The URL of the store cannot be read: write it like postgresql://user@host/name, or "
            "name a folder."
        ) from None
    if "@" in (url.host or ""):  # The rest of a password, which messages would quote.
        raise validation.UsageError(
            "The URL of the store has an @ in its password: write it as %40, or leave the password "
            "out of the URL, for PGPASSWORD or a password file."
        )
    return url


def _by_url(text: str) -> tuple[sql.engine.Engine, str]:
    url = _read_url(text)
    shown = url.difference_update_query(_SECRET_OPTIONS)
    name = shown.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite":
        raise validation.UsageError(f"store must be a folder for SQLite, got the URL {name!r}.")
    if url.drivername == "postgresql":  # SQLAlchemy's default is another driver since 2.1.
        url = url.set(drivername="postgresql+psycopg2")
    try:
        engine = sql.create_engine(url, **_options(url), hide_parameters=True, future=True)
    except exc.NoSuchModuleError:
        raise validation.UsageError(
            f"store names the unknown kind of database {url.drivername!r}: use postgresql://, or "
            "name a folder."
        ) from None
    except ModuleNotFoundError as error:
        driver = error.name or ""
        raise validation.UsageError(
            f"store={name!r} needs the driver {driver!r}, which is not installed: "
            f"pip install {_PACKAGES.get(driver, driver)}, or name a folder."
        ) from None
    if url.get_backend_name() == "postgresql":
        event.listen(engine, "connect", _prepare_session)
    return engine, name


def _options(url: sql.engine.URL) -> dict[str, Any]:
    """Returns the options of the engine of a server's database; the URL's own options win."""
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "postgresql":
        # After waiting for a locked row, a transaction must read its new values.
        options["isolation_level"] = "READ COMMITTED"
        if url.get_driver_name() in _LIBPQ_DRIVERS:
            given = {k: v for k, v in _NETWORK.items() if k not in url.query}
            options["connect_args"] = given
    return options


def _prepare_session(connection: Any, _: Any) -> None:
    """Sets time-outs, durable commits and, where the user may, a log that quotes no values."""
    cursor = connection.cursor()
    try:
        cursor.execute(f"SET lock_timeout = '{_BUSY_SECONDS}s'")
        # Ends the transaction of a server that hangs or is cut off while it locks the lease.
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{_BUSY_SECONDS}s'")
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        for name, value in _UNLOGGED.items():  # Only superusers may set these.
            cursor.execute(
                "SELECT set_config(%s, %s, false) WHERE current_setting('is_superuser') = 'on'",
                (name, value),
            )
    finally:
        cursor.close()
    connection.commit()
