"""How the database of a store is found, refused, and kept secret."""

import itertools
import os
import sqlite3
import stat
import sys
import threading

import pytest
from sqlalchemy import event

from tff_dpftrl.runtime.store import interface, sql


def test_nobody_else_may_read_the_files(tmp_path):
    folder = tmp_path / "data" / "store"
    with sql.SqlStore(folder) as store:
        store.acquire("keyboard", "a", now=0.0, duration=5.0)
        store.add_task("keyboard", "task", model=b"", state=b"the seed")
        files = sorted(folder.iterdir())
        assert [file.name for file in files] == [
            "store.sqlite",
            "store.sqlite-shm",
            "store.sqlite-wal",
        ]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path):
    folder = tmp_path / "store"
    sql.SqlStore(folder).close()
    path = folder / "store.sqlite"
    path.chmod(0o644)
    sql.SqlStore(folder).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(interface.StoreError, match="Cannot write to the store at .*file/store"):
        sql.SqlStore(tmp_path / "file" / "store")


def test_another_kind_of_file_is_not_overwritten(tmp_path):
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"somebody's letters " * 100)
    with pytest.raises(interface.StoreError, match="Cannot open the store .*not a database"):
        sql.SqlStore(tmp_path)
    assert path.read_bytes() == b"somebody's letters " * 100


def test_a_store_of_another_format_is_refused(tmp_path):
    sql.SqlStore(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.sqlite") as connection:
        connection.execute("UPDATE store_format SET version = 99")
    connection.close()
    with pytest.raises(interface.StoreError, match="has format 99"):
        sql.SqlStore(tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://host:no number/name", "cannot be read"),
        ("oracle9000://host/name", "unknown kind of database 'oracle9000'"),
        ("sqlite:///store.sqlite", "must be a folder for SQLite"),
        ("postgresql+pg8000://user@host/name", "needs the driver 'pg8000'"),
    ],
)
def test_bad_urls_are_one_clear_line(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        sql.SqlStore(url)
    assert "\n" not in str(caught.value)


def test_a_missing_driver_is_named_as_it_can_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(ValueError, match="needs the driver 'psycopg2'.*install psycopg2-binary,"):
        sql.SqlStore("postgresql://user@host/name")


def test_errors_print_neither_passwords_nor_what_was_written(tmp_path):
    with pytest.raises(ValueError) as caught:
        sql.SqlStore("postgresql+pg8000://user:secret@host/name")
    assert "secret" not in str(caught.value)
    with sql.SqlStore(tmp_path) as store:
        store.acquire("keyboard", "a", now=0.0, duration=5.0)
        store.add_task("keyboard", "task", model=b"", state=b"")
        with sqlite3.connect(tmp_path / "store.sqlite") as connection:
            connection.execute(
                "CREATE TRIGGER fails BEFORE INSERT ON rounds BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        connection.close()
        with pytest.raises(interface.StoreError, match="Cannot write to the store") as caught:
            store.commit(
                "keyboard",
                "task",
                round_index=0,
                epoch=1,
                model=b"the weights",
                state=b"the seed",
                metrics={},
                now=0.0,
            )
        assert "\n" not in str(caught.value)
        assert "seed" not in str(caught.value) and "weights" not in str(caught.value)
        # The transaction that failed left nothing behind.
        assert store.last_commit("keyboard", "task").rounds_done == 0


def _killed_at(folder, statement):
    """Commits rounds in a process that dies when it is about to execute a statement of SQL."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        statements = itertools.count(1)
        with sql.SqlStore(folder) as store:

            def count(*_):
                if next(statements) == statement:
                    os._exit(9)

            event.listen(store._engine, "before_cursor_execute", count)
            event.listen(store._engine, "commit", count)
            owner = f"owner {statement}"
            epoch = store.acquire("keyboard", owner, now=float(statement), duration=0.5).epoch
            for t in range(store.last_commit("keyboard", "task").rounds_done, 1000):
                after = b"%d" % (t + 1)
                store.commit(
                    "keyboard",
                    "task",
                    round_index=t,
                    epoch=epoch,
                    model=after,
                    state=after,
                    metrics={"loss": t},
                    now=0.0,
                )
    finally:
        os._exit(1)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_whole_commits(tmp_path, step):
    with sql.SqlStore(tmp_path) as store:
        store.add_task("keyboard", "task", model=b"0", state=b"0")
    committed = set()
    for statement in range(1, 31, step):
        assert _killed_at(tmp_path, statement) == 9
        with sql.SqlStore(tmp_path) as store:
            last = store.last_commit("keyboard", "task")
            assert last.model == last.state == b"%d" % last.rounds_done
            rounds = [row["round"] for row in store.history("keyboard", "task")]
            assert rounds == list(range(last.rounds_done))
            committed.add(last.rounds_done)
    assert len(committed) > 10 / step


def test_opening_waits_for_whoever_is_making_the_file(tmp_path):
    # Another process that has begun to write, in the journal mode that a new file has.
    other = sqlite3.connect(
        tmp_path / "store.sqlite", isolation_level=None, check_same_thread=False
    )
    other.execute("CREATE TABLE something (x)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.commit)
    release.start()
    try:
        with sql.SqlStore(tmp_path) as store:
            assert store.tasks("keyboard") == ()
    finally:
        release.join()
        other.close()
