"""Stores of format 1, whose rows had no digests, go on in the present format."""

import contextlib
import json
import os
import sqlite3

import pytest
import sqlalchemy
from sqlalchemy import event

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.store import database, interface, sql, tables

server = postgresql.server

_FORMAT_1 = """
CREATE TABLE store_format (version INTEGER NOT NULL, PRIMARY KEY (version));
CREATE TABLE leases (population VARCHAR(200) NOT NULL, owner TEXT NOT NULL, epoch BIGINT NOT NULL,
    expires_at {double} NOT NULL, PRIMARY KEY (population));
CREATE TABLE commits (population VARCHAR(200) NOT NULL, task VARCHAR(200) NOT NULL,
    rounds_done BIGINT NOT NULL, epoch BIGINT NOT NULL, model {bytes} NOT NULL,
    state {bytes} NOT NULL, metrics TEXT NOT NULL, PRIMARY KEY (population, task));
CREATE TABLE rounds (population VARCHAR(200) NOT NULL, task VARCHAR(200) NOT NULL,
    round BIGINT NOT NULL, epoch BIGINT NOT NULL, committed_at {double} NOT NULL,
    metrics TEXT NOT NULL, PRIMARY KEY (population, task, round));
INSERT INTO store_format VALUES (1);
INSERT INTO leases VALUES ('keyboard', 'a', 2, 1700000015.7300001);
INSERT INTO commits VALUES ('keyboard', 'nwp', 3, 2, {model}, {state}, '{{"loss": 0.25}}');
INSERT INTO commits VALUES ('keyboard', 'new', 0, 0, {model}, {state}, '{{}}');
INSERT INTO rounds VALUES ('keyboard', 'nwp', 0, 1, 1700000000.1000001, '{{"loss": 1.0}}');
INSERT INTO rounds VALUES ('keyboard', 'nwp', 1, 2, 1700000001, '{{"loss": null}}');
INSERT INTO rounds VALUES ('keyboard', 'nwp', 2, 2, 1700000002.3, '{{"loss": 0.25}}');
"""
_SQLITE = _FORMAT_1.format(
    double="FLOAT", bytes="BLOB", model="x'00ff01'", state="CAST('the seed' AS BLOB)"
)
_POSTGRESQL = _FORMAT_1.format(
    double="FLOAT(53)", bytes="BYTEA", model=r"'\x00ff01'", state="'the seed'"
)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where there is a store of format 1."""
    if request.param == "sqlite":
        _execute(tmp_path, _SQLITE)
        return tmp_path
    running = request.getfixturevalue("server")
    url = running.new_database()
    with contextlib.closing(running.connect(url.rpartition("/")[2])) as connection:
        connection.cursor().execute(_POSTGRESQL)
    return url


def _execute(folder, script):
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as connection:
        connection.executescript(script)


def _content(folder):
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as connection:
        return list(connection.iterdump())


def _commit(store, round_index):
    return store.commit(
        "keyboard",
        "nwp",
        round_index=round_index,
        epoch=2,
        model=b"next",
        state=b"next",
        metrics={"loss": 0.125},
        now=1.7e9,
    )


def _check(store, rounds):
    assert store.tasks("keyboard") == ("new", "nwp")
    new = interface.Commit("new", 0, 0, b"\0\xff\1", b"the seed", {})
    assert store.last_commit("keyboard", "new") == new
    history = store.history("keyboard", "nwp")
    assert [(row["round"], row["epoch"], row["loss"]) for row in history] == [
        (0, 1, 1.0),
        (1, 2, None),
        (2, 2, 0.25),
        (3, 2, 0.125),
    ][:rounds]
    assert history[0]["committed_at"] == 1700000000.1000001


def test_a_store_without_digests_goes_on_with_them(place):
    last = interface.Commit("nwp", 3, 2, b"\0\xff\1", b"the seed", {"loss": 0.25})
    for _ in range(2):  # The second time it is of the present format.
        with sql.SqlStore(place) as store:
            assert store.lease("keyboard") == interface.Lease(
                "keyboard", "a", 2, 1700000015.7300001
            )
            assert store.last_commit("keyboard", "nwp") == last
            _check(store, 3)
    with sql.SqlStore(place) as store:
        _commit(store, 3)
    with sql.SqlStore(place) as store:
        assert store.last_commit("keyboard", "nwp").model == b"next"
        _check(store, 4)
        store.acquire("keyboard", "b", now=2e9, duration=5.0)


def test_what_is_changed_after_it_is_found(place):
    sql.SqlStore(place).close()
    engine, _ = database.open_database(place)
    with engine.begin() as connection:
        rounds = tables.ROUNDS
        change = rounds.update().where(rounds.c.round == 0).values(metrics=json.dumps({"loss": 2}))
        connection.execute(change)
    engine.dispose()
    with pytest.raises(interface.StoreDamaged, match="round 1 of the task 'nwp'.*keyboard/nwp 3"):
        sql.SqlStore(place)


def test_a_server_of_the_old_version_that_still_runs_writes_nothing(place):
    # It would write rows without digests, or take pieces for damage.
    sql.SqlStore(place).close()
    engine, _ = database.open_database(place)
    for of_old in ("expires_at", "ends_at, digest"):  # Of formats 1 and 2.
        with engine.connect() as connection, pytest.raises(sqlalchemy.exc.DBAPIError):
            # The statement with which it begins each commit, and each change of its lease.
            connection.execute(
                sqlalchemy.text(f"SELECT population, owner, epoch, {of_old} FROM leases")
            )
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE commits SET model = 9000000000", "last commit .* holds something else"),
        ("UPDATE commits SET metrics = '[1]' WHERE task = 'nwp'", "holds something else"),
        ("UPDATE rounds SET metrics = 'no JSON'", "a round holds something else"),
        ("UPDATE leases SET epoch = x'00'", "a lease holds something else"),
        ("UPDATE leases SET epoch = 1", "lease .* is older than its last commit"),
        ("DELETE FROM rounds WHERE round = 1", "round 2 .* is missing"),
        ("DELETE FROM rounds WHERE round = 2", "last commit of the task 'nwp'"),
        ("UPDATE commits SET rounds_done = 2", "task 'nwp'"),
        ("UPDATE commits SET epoch = 1", "last commit of the task"),
        ("DELETE FROM commits WHERE task = 'nwp'", "'nwp' .* has rounds that its last commit"),
        ("DELETE FROM store_format", "has lost the number of its format"),
        ("DROP TABLE rounds", "has lost the tables .'rounds'."),
    ],
)
def test_a_store_that_is_damaged_already_is_left_as_it_is(tmp_path, change, message):
    _execute(tmp_path, _SQLITE)
    _execute(tmp_path, change)
    before = _content(tmp_path)
    with pytest.raises(interface.StoreDamaged, match=message) as caught:
        sql.SqlStore(tmp_path)
    assert "Restore only a backup" in str(caught.value) and "\n" not in str(caught.value)
    assert _content(tmp_path) == before


def _killed_at(folder, statement):
    """Opens a store in a process that dies when it is about to execute a statement of SQL."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        left = [statement]

        def count(*_):
            left[0] -= 1
            if not left[0]:
                os._exit(9)

        event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", count)
        event.listen(sqlalchemy.engine.Engine, "commit", count)
        sql.SqlStore(folder).close()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_process_that_is_killed_leaves_the_old_format_or_the_new_one(tmp_path):
    _execute(tmp_path, _SQLITE)
    old, before = (tmp_path / "store.sqlite").read_bytes(), _content(tmp_path)
    killed = 0
    for statement in range(1, 200, 5):
        folder = tmp_path / f"{statement}"
        folder.mkdir()
        (folder / "store.sqlite").write_bytes(old)
        code = _killed_at(folder, statement)
        if code == 0:
            break
        assert code == 9
        killed += 1
        assert _content(folder) == before
        with sql.SqlStore(folder) as store:
            _check(store, 3)
    assert killed > 5


def test_processes_that_open_it_at_once_find_the_same(place):
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                with sql.SqlStore(place) as store:
                    _check(store, 3)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
