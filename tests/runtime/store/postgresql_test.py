"""A store in PostgreSQL, whose server or connection goes away at any moment."""

import contextlib
import itertools
import os
import socket
import threading

import pytest
import sqlalchemy
from sqlalchemy import event

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.store import database, interface, sql, tables

server = postgresql.server

_SECRET = b"the seed of the noise"


@pytest.fixture
def store(server):
    with sql.SqlStore(server.new_database()) as made:
        made.add_task("keyboard", "task", model=b"0", state=_SECRET + b"0")
        made.acquire("keyboard", "a", now=0.0, duration=50.0)
        yield made


def _commit(store, round_index):
    after = b"%d" % (round_index + 1)
    return store.commit(
        "keyboard",
        "task",
        round_index=round_index,
        epoch=1,
        model=after,
        state=_SECRET + after,
        metrics={"loss": round_index},
        now=0.0,
    )


def _check_whole(store):
    """A commit is whole or absent; returns how many there are."""
    last = store.last_commit("keyboard", "task")
    assert last.model == b"%d" % last.rounds_done
    assert last.state == _SECRET + last.model
    rounds = [row["round"] for row in store.history("keyboard", "task")]
    assert rounds == list(range(last.rounds_done))
    return last.rounds_done


def _at_statement(store, number, action):
    """Has `action` done before a statement of SQL, counted from 1, commits counted too."""
    statements = itertools.count(1)

    def count(connection, *_):
        if next(statements) == number:
            action(connection)

    event.listen(store._engine, "before_cursor_execute", count)
    event.listen(store._engine, "commit", count)

    def forget():
        event.remove(store._engine, "before_cursor_execute", count)
        event.remove(store._engine, "commit", count)

    return forget


def _backend(connection):
    return connection.connection.get_backend_pid()


def _faults(server, restarts):
    def terminated(connection):
        pid = _backend(connection)
        server.execute("SELECT pg_terminate_backend(%s)", pid)
        while server.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid):
            pass  # The server gets the signal, and ends a moment later.

    def killed(connection):
        server.kill()
        restarts.append(server)

    return {"terminated": terminated, "killed": killed}


@pytest.mark.parametrize("fault", ["terminated", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_commit_that_is_interrupted_between_statements_is_absent(server, store, fault):
    restarts = []
    fail = _faults(server, restarts)[fault]
    done = failures = 0
    for statement in range(1, 20):
        forget = _at_statement(store, statement, fail)
        try:
            _commit(store, done)
            break
        except interface.StoreError as error:
            failures += 1
            said = str(error)
        finally:
            forget()
        assert said.startswith("Cannot write to the store at postgresql://tests:***@127.0.0.1:")
        assert "\n" not in said and server.password not in said and "seed" not in said
        while restarts:
            restarts.pop().start()
        assert _check_whole(store) == done
        done = _commit(store, done).rounds_done  # The connection is back, and nothing is locked.
    # The lease's lock, the last commit and its round, the swap, the old pieces, the round's row,
    # and the commit.
    assert failures == 7
    assert _check_whole(store) == done + 1


def test_commits_between_the_statements_of_a_reader_are_no_damage(store):
    place = store._engine.url.render_as_string(hide_password=False)
    busy = [False]
    rounds = itertools.count()

    def lead_and_commit(*_):
        if not busy[0]:
            busy[0] = True
            t = next(rounds)
            now = 100.0 * (t + 1)
            epoch = store.acquire("keyboard", f"{t}", now=now, duration=50.0).epoch
            store.commit(
                "keyboard",
                "task",
                round_index=t,
                epoch=epoch,
                model=b"",
                state=b"",
                metrics={},
                now=0,
            )
            busy[0] = False

    event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", lead_and_commit)
    try:
        with sql.SqlStore(place) as other:
            opened = store.last_commit("keyboard", "task").rounds_done
            other.last_commit("keyboard", "task")
            other.history("keyboard", "task")
    finally:
        event.remove(sqlalchemy.engine.Engine, "before_cursor_execute", lead_and_commit)
    assert opened > 5


@pytest.mark.parametrize("leaves_states", [False, True])
def test_pieces_are_of_the_commit_whose_row_was_read(store, leaves_states):
    def content(round_index):
        return bytes([round_index]) * (2**20 * (4 - round_index))

    def commit(round_index):
        both = {"model": content(round_index), "state": content(round_index)}
        common = {"epoch": 1, "metrics": {}, "now": 0.0}
        store.commit("keyboard", "task", round_index=round_index, **both, **common)

    commit(0)
    place = store._engine.url.render_as_string(hide_password=False)
    rounds = iter((1, 2))
    with sql.SqlStore(place, leaves_states=leaves_states) as other:
        # The row of the commit is read first, then its rounds, and then piece by piece.
        forgets = [_at_statement(other, at, lambda _: commit(next(rounds))) for at in (3, 5)]
        try:
            last = other.last_commit("keyboard", "task")
        finally:
            for forget in forgets:
                forget()
    assert next(rounds, None) is None
    assert (last.rounds_done, last.model) == (1, content(0))
    assert leaves_states or last.state == content(0)


@pytest.mark.parametrize("piece_bytes", [2**20, 2**30], ids=["pieces", "row of format 2"])
def test_a_large_state_is_read_into_buffers(store, monkeypatch, piece_bytes):
    content = bytes(range(256)) * 2**13
    with monkeypatch.context() as written:
        written.setattr(sql, "_PIECE_BYTES", piece_bytes)
        store.add_task("keyboard", "large", model=content, state=content)
    place = store._engine.url.render_as_string(hide_password=False)
    with sql.SqlStore(place, leaves_states=True) as other:
        state = other.last_commit("keyboard", "large").state
        buffers = [bytearray(5), bytearray(len(state) - 5)]
        state.fill([memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == content


class _Line:
    """A connection to a server that can be cut before the answer comes back."""

    def __init__(self, port):
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.swallow = b""  # The last that the server is sent; the client hears no answer to it.
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            cut = threading.Event()
            for pair in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(*pair, cut), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pump(self, source, sink, asks, cut):
        try:
            while data := source.recv(65536):
                if asks and self.swallow and self.swallow in data:
                    cut.set()
                if not asks and cut.is_set():
                    break  # It has been done: this is the answer.
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):  # Or a thread that reads of it would not know.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def test_a_commit_whose_answer_is_lost_is_made_once(server, store):
    line = _Line(server.port)
    through = store._engine.url.set(port=line.port).render_as_string(hide_password=False)
    try:
        with sql.SqlStore(through) as other:
            assert other.last_commit("keyboard", "task").rounds_done == 0
            line.swallow = b"COMMIT\0"
            with pytest.raises(interface.StoreError, match="Cannot write to the store"):
                _commit(other, 0)
            line.swallow = b""
            # A retry is refused, since the commit has been made, and reads it.
            with pytest.raises(interface.RoundConflict, match="1 rounds are done"):
                _commit(other, 0)
            assert _check_whole(other) == 1
    finally:
        line.close()
    assert _check_whole(store) == 1


@pytest.mark.seconds(60)  # Its server's, from the first test of the file on, are counted here.
def test_a_store_outlives_its_connections_and_its_server(server, store):
    _commit(store, 0)
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
        "pg_backend_pid() AND backend_type = 'client backend'"
    )
    _commit(store, 1)  # Nobody sees that the connection is another one.
    server.kill()
    for ask in (
        lambda: store.lease("keyboard"),
        lambda: _commit(store, 2),
        lambda: store.acquire("keyboard", "b", now=60.0, duration=5.0),
    ):
        with pytest.raises(interface.StoreError) as caught:
            ask()
        assert "\n" not in str(caught.value) and server.password not in str(caught.value)
    server.start()
    assert store.lease("keyboard").owner == "a"
    _commit(store, 2)
    assert _check_whole(store) == 3


def test_what_the_server_is_set_to_makes_no_commit_less_durable_or_isolated(server):
    url = server.new_database()
    name = url.rpartition("/")[2]
    for setting in ("synchronous_commit = off", "default_transaction_isolation = serializable"):
        server.execute(f"ALTER DATABASE {name} SET {setting}")
    with sql.SqlStore(url) as store, store._engine.connect() as connection:
        for setting, value in (
            ("synchronous_commit", "on"),
            ("transaction_isolation", "read committed"),
            ("lock_timeout", "30s"),
            ("idle_in_transaction_session_timeout", "30s"),
        ):
            actual = connection.execute(sqlalchemy.text(f"SHOW {setting}")).scalar()
            assert actual == value, setting


def test_a_wrong_password_a_missing_database_and_a_server_that_is_not_there_are_one_line(server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        unused = taken.getsockname()[1]
    right, host = server.url("nothing"), f"127.0.0.1:{server.port}"
    for url, message in (
        (right, 'database "nothing" does not exist'),
        (f"postgresql://tests:geheim@{host}/postgres", "password authentication failed"),
        (f"postgresql://tests@{host}/postgres?password=geheim", "password authentication failed"),
        (f"postgresql://tests:geheim@127.0.0.1:{unused}/x", "Connection refused"),
        (f"postgresql://tests:geheim@{host}/postgres?nonsense=1", "invalid"),
    ):
        with pytest.raises(interface.StoreError, match=message) as caught:
            sql.SqlStore(url)
        said = str(caught.value)
        assert said.startswith("Cannot open the store at postgresql://tests")
        assert "\n" not in said and "geheim" not in said and server.password not in said
    with pytest.raises(ValueError, match="write it as %40") as caught:
        sql.SqlStore(f"postgresql://tests:ge@heim@{host}/postgres")
    assert "heim" not in str(caught.value)


def test_passwords_are_not_in_what_is_printed_of_a_store(server, store, capsys):
    assert server.password not in repr(store._engine) + str(vars(store))
    said = capsys.readouterr()
    assert server.password not in said.out + said.err


def test_what_is_written_is_not_in_the_server_s_log(server, store):
    name = store._engine.url.database
    with contextlib.closing(server.connect(name)) as connection:
        cursor = connection.cursor()
        cursor.execute(
            "CREATE FUNCTION is_full() RETURNS trigger LANGUAGE plpgsql "
            "AS $$ BEGIN RAISE disk_full; END $$"
        )
        cursor.execute("CREATE TRIGGER is_full BEFORE UPDATE ON commits EXECUTE FUNCTION is_full()")
    with pytest.raises(interface.StoreError, match="disk_full"):
        _commit(store, 0)
    assert "disk_full" in server.log()
    assert _SECRET.hex() not in server.log()


def test_a_log_that_quotes_statements_is_warned_of(server, caplog):
    url = server.new_database()
    sql.SqlStore(url).close()
    assert not caplog.records
    name = url.rpartition("/")[2]
    role = f"role_{name}"
    password = server.password
    with contextlib.closing(server.connect(name)) as connection:
        cursor = connection.cursor()
        cursor.execute(f"CREATE ROLE {role} LOGIN PASSWORD %s", (password,))
        cursor.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        theirs = url.replace("//tests:", f"//{role}:")
        sql.SqlStore(theirs).close()
        [record] = caplog.records
        assert f'ALTER ROLE "{role}" SET' in record.getMessage()
        assert password not in record.getMessage()
        caplog.clear()
        cursor.execute(f"ALTER ROLE {role} SET log_min_error_statement = panic")
        sql.SqlStore(theirs).close()
        assert not caplog.records


def test_a_store_of_another_format_is_refused(server):
    url = server.new_database()
    sql.SqlStore(url).close()
    engine, _ = database.open_database(url)
    with engine.begin() as connection:
        connection.execute(tables.FORMAT.update().values(version=99))
    engine.dispose()
    with pytest.raises(interface.StoreError, match="has format 99") as caught:
        sql.SqlStore(url)
    assert server.password not in str(caught.value)


def test_a_user_without_rights_is_refused(server):
    url = server.new_database()
    sql.SqlStore(url).close()
    name = url.rpartition("/")[2]
    server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with sql.SqlStore(url) as store:
        assert store.tasks("keyboard") == ()
        with pytest.raises(interface.StoreError, match="read-only transaction"):
            store.add_task("keyboard", "task", model=b"", state=b"")


@pytest.mark.slow
def test_processes_that_make_the_tables_at_once_find_the_same(server):
    for _ in range(3):
        url = server.new_database()
        children = []
        for _ in range(5):
            child = os.fork()
            if not child:
                try:
                    sql.SqlStore(url).close()
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 5
        sql.SqlStore(url).close()
