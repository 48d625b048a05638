"""Several processes, and machines with clocks of their own, on one store."""

import contextlib
import os
import signal
import time

import pytest

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.store import database, interface, sql

server = postgresql.server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    if request.param == "sqlite":
        return tmp_path / "store"
    return request.getfixturevalue("server").new_database()


@contextlib.contextmanager
def _process(action):
    """Runs `action` in a fork, which is killed at the end if it has not ended; yields its id."""
    child = os.fork()
    if not child:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _commit(store, round_index, epoch, content):
    return store.commit(
        "keyboard",
        "task",
        round_index=round_index,
        epoch=epoch,
        model=content,
        state=content,
        metrics={"by": content.decode()},
        now=0.0,
    )


_ROUNDS = 30


def _lead_now_and_then(place, owner):
    """Takes the lease whenever it is free, commits one round under it, and gives it back."""
    with sql.SqlStore(place) as store:
        with contextlib.suppress(interface.TaskExists):
            store.add_task("keyboard", "task", model=b"", state=b"")
        while True:
            try:
                lease = store.acquire("keyboard", owner, now=0.0, duration=1.0)
            except interface.LeaseHeld:
                continue
            done = store.last_commit("keyboard", "task").rounds_done
            if done < _ROUNDS:
                _commit(store, done, lease.epoch, owner.encode())
            store.release("keyboard", owner, lease.epoch)
            if done == _ROUNDS:
                return


def test_processes_that_lead_in_turn_commit_every_round_once(place):
    with contextlib.ExitStack() as stack:
        children = [  # Of them, one makes the tables.
            stack.enter_context(_process(lambda i=i: _lead_now_and_then(place, f"process {i}")))
            for i in range(4)
        ]
        assert [_ended(child) for child in children] == [0] * 4
    with sql.SqlStore(place) as store:
        history = store.history("keyboard", "task")
        assert [row["round"] for row in history] == list(range(_ROUNDS))
        epochs = [row["epoch"] for row in history]
        assert epochs == sorted(set(epochs))  # A lease, and so an epoch, for each.
        last = store.last_commit("keyboard", "task")
        assert last.model == last.state == history[-1]["by"].encode()
        assert store.lease("keyboard").epoch >= epochs[-1]


def test_of_two_hosts_whose_clocks_differ_one_commits(place):
    # The clock of b is an hour ahead: to b, the lease of a has ended long ago.
    with sql.SqlStore(place) as a, sql.SqlStore(place) as b:
        a.add_task("keyboard", "task", model=b"", state=b"")
        of_a = a.acquire("keyboard", "a", now=1000.0, duration=15.0)
        _commit(a, 0, of_a.epoch, b"a")
        of_b = b.acquire("keyboard", "b", now=4600.0, duration=15.0)
        assert of_b.epoch == of_a.epoch + 1
        # By its own clock a leads still; it can neither renew nor commit, nor take the lease back.
        with pytest.raises(interface.LeaseLost):
            a.renew("keyboard", "a", of_a.epoch, now=1001.0, duration=15.0)
        with pytest.raises(interface.StaleEpoch):
            _commit(a, 1, of_a.epoch, b"a")
        with pytest.raises(interface.LeaseHeld):
            a.acquire("keyboard", "a", now=1001.0, duration=15.0)
        # What a read of the task is not set back by, whatever its clock says.
        assert _commit(b, 1, of_b.epoch, b"b").rounds_done == 2
        assert a.last_commit("keyboard", "task").model == b"b"
        # The clock of a goes on from b's lease, not from its own.
        again = a.acquire("keyboard", "a", now=4615.0, duration=15.0)
        assert again.epoch == of_b.epoch + 1


def _stop_in_a_transaction(place, event_name):
    from sqlalchemy import event

    with sql.SqlStore(place) as store:
        epoch = store.acquire("keyboard", "a", now=0.0, duration=1.0).epoch
        stop = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
        event.listen(store._engine, event_name, stop)
        _commit(store, 0, epoch, b"of the stopped one")


def test_who_is_stopped_in_the_middle_of_a_commit_keeps_nobody_waiting(server, monkeypatch):
    # It holds the lock of the lease; on the other end, the database takes it away.
    monkeypatch.setattr(database, "_BUSY_SECONDS", 1)
    place = server.new_database()
    with sql.SqlStore(place) as store:
        store.add_task("keyboard", "task", model=b"", state=b"")
        with _process(lambda: _stop_in_a_transaction(place, "commit")) as child:
            os.waitpid(child, os.WUNTRACED)
            started = time.monotonic()
            for _ in range(3):  # To wait for the lock comes to an end, too.
                try:
                    lease = store.acquire("keyboard", "b", now=5.0, duration=60.0)
                    break
                except interface.StoreError as error:
                    assert "lock timeout" in str(error)
            assert time.monotonic() - started < 60
            assert lease.epoch == 2
            assert store.last_commit("keyboard", "task").rounds_done == 0
            _commit(store, 0, lease.epoch, b"of the new one")
            os.kill(child, signal.SIGCONT)
            assert _ended(child) == 1
        assert store.last_commit("keyboard", "task").model == b"of the new one"
