"""Large models and states are kept in pieces, and read when they are needed."""

import pickle

import numpy as np
import pytest
from sqlalchemy import event

from tff_dpftrl.runtime.store import contents, database, interface, sql, tables

_MIB = 1 << 20


def _content(seed, size=2 * _MIB + 7):
    return np.random.default_rng(seed).bytes(size)


def _in_parts(content):
    view = memoryview(content)
    return contents.InMemory([content[:3], view[3:3], view[3:_MIB], view[_MIB:]])


def _commit(store, round_index, seed, size=2 * _MIB + 7, epoch=1):
    return store.commit(
        "keyboard",
        "nwp",
        round_index=round_index,
        epoch=epoch,
        model=_content(seed, size),
        state=_in_parts(_content(seed + 1, size)),
        metrics={},
        now=1.0,
    )


@pytest.fixture
def folder(tmp_path):
    with sql.SqlStore(tmp_path) as store:
        added = store.add_task("keyboard", "nwp", model=_content(0), state=_in_parts(_content(1)))
        assert added == interface.Commit("nwp", 0, 0, _content(0), _content(1))
        assert isinstance(added.state, bytes)
        store.acquire("keyboard", "a", now=0.0, duration=9.0)
    return tmp_path


def _num_pieces(folder):
    engine, _ = database.open_database(folder)
    with engine.begin() as connection:
        found = connection.execute(tables.PIECES.select()).all()
    engine.dispose()
    return len(found)


@pytest.mark.parametrize("leaves_states", [False, True])
def test_large_contents_come_back(folder, leaves_states):
    with sql.SqlStore(folder, leaves_states=leaves_states) as store:
        for commit in (_commit(store, 0, 2), store.last_commit("keyboard", "nwp")):
            assert (commit.model, bytes(commit.state)) == (_content(2), _content(3))
            assert isinstance(commit.state, contents.Content) == leaves_states
            assert len(commit.state) == len(_content(3))
            assert pickle.loads(pickle.dumps(commit.state)) == _content(3)
        assert _num_pieces(folder) == 6
        assert store.rows("keyboard", "nwp").commit.model == _content(2)
        _commit(store, 1, 4, size=5)  # Small ones are in the row.
        last = store.last_commit("keyboard", "nwp")
        assert (last.model, last.state) == (_content(4, 5), _content(5, 5))
    assert _num_pieces(folder) == 0


def test_a_state_is_read_into_buffers(folder):
    with sql.SqlStore(folder, leaves_states=True) as store:
        state = store.last_commit("keyboard", "nwp").state
        assert state.head() == _content(1)[:_MIB]
        buffers = [bytearray(size) for size in (10, 0, _MIB, _MIB - 3)]
        state.fill([memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == _content(1)


def test_the_lease_is_renewed_while_a_state_is_read(folder, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.1)
    renewed = []

    def renew(connection, cursor, statement, *_):
        if statement.startswith("SELECT pieces.bytes"):
            renewed.append(store.renew("keyboard", "a", 1, now=1.0, duration=9.0))

    with sql.SqlStore(folder, leaves_states=True) as store:
        state = store.last_commit("keyboard", "nwp").state
        event.listen(store._engine, "before_cursor_execute", renew)
        assert bytes(state) == _content(1)
        event.remove(store._engine, "before_cursor_execute", renew)
    assert len(renewed) == 3


def test_a_large_state_in_a_row_of_an_older_format_is_read_into_buffers(folder, monkeypatch):
    with monkeypatch.context() as older, sql.SqlStore(folder) as store:
        older.setattr(sql, "_PIECE_BYTES", 1 << 30)
        _commit(store, 0, 2)
    assert _num_pieces(folder) == 0
    with sql.SqlStore(folder, leaves_states=True) as store:
        state = store.last_commit("keyboard", "nwp").state
        assert (len(state), bytes(state)) == (len(_content(3)), _content(3))
        buffer = bytearray(len(state))
        state.fill([memoryview(buffer)])
        assert bytes(buffer) == _content(3)


def test_the_state_of_an_older_commit_is_refused(folder):
    with sql.SqlStore(folder, leaves_states=True) as store:
        old = store.last_commit("keyboard", "nwp").state
        _commit(store, 0, 2)
        with pytest.raises(interface.StoreError, match="must not be released"):
            old.fill([memoryview(bytearray(len(old)))])
        with pytest.raises(interface.StoreError, match="must not be released"):
            bytes(old)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE pieces SET bytes = x'00' WHERE number = 1",
        "UPDATE pieces SET bytes = 'text' WHERE number = 1",
        "DELETE FROM pieces WHERE number = 2",
        "UPDATE pieces SET number = 5 WHERE number = 0",
        "INSERT INTO pieces SELECT population, task, content, 9, bytes FROM pieces"
        " WHERE number = 2",
        "DELETE FROM pieces",
    ],
)
def test_damaged_pieces_are_found(folder, change):
    with sql.SqlStore(folder, leaves_states=True) as store:
        state = store.last_commit("keyboard", "nwp").state
        with store._engine.begin() as connection:
            connection.exec_driver_sql(change)
        with pytest.raises(interface.StoreDamaged, match="the model of the task 'nwp'"):
            store.last_commit("keyboard", "nwp")
        with pytest.raises(interface.StoreDamaged, match="the state of the task 'nwp'"):
            state.fill([memoryview(bytearray(len(state)))])
        with pytest.raises(interface.StoreDamaged, match="the state of the task 'nwp'"):
            bytes(state)


def test_a_store_without_its_table_of_pieces_is_damaged(folder):
    with sql.SqlStore(folder) as store, store._engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE pieces")
    with pytest.raises(interface.StoreDamaged, match="has lost the tables .'pieces'."):
        sql.SqlStore(folder)


def test_a_refused_commit_leaves_the_pieces_as_they_are(folder):
    with sql.SqlStore(folder) as store:
        with pytest.raises(interface.RoundConflict):
            _commit(store, 1, 2)
        with pytest.raises(interface.StaleEpoch):
            _commit(store, 0, 2, epoch=2)
        assert store.last_commit("keyboard", "nwp").state == _content(1)


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_without_pieces_or_attempts_goes_on_with_them(tmp_path, version):
    engine, _ = database.open_database(tmp_path)
    with engine.begin() as connection:  # As formats 2 and 3 were.
        if version == 2:
            tables.PIECES.drop(connection)
            connection.exec_driver_sql("ALTER TABLE leases RENAME COLUMN valid_until TO ends_at")
        connection.exec_driver_sql("ALTER TABLE commits DROP COLUMN attempt")
        connection.execute(tables.FORMAT.update().values(version=version))
    engine.dispose()
    for _ in range(2):
        with sql.SqlStore(tmp_path) as store:
            assert store.tasks("keyboard") == ()
            assert store.lease("keyboard") is None
    with sql.SqlStore(tmp_path) as store:
        assert store.add_task("keyboard", "nwp", model=_content(0), state=_content(1)).attempt == ""
        epoch = store.acquire("keyboard", "a", now=0.0, duration=1.0).epoch
        store.begin_attempt("keyboard", "nwp", round_index=0, epoch=epoch, attempt="first")
        assert store.last_commit("keyboard", "nwp").attempt == "first"
    assert _num_pieces(tmp_path) == 6
