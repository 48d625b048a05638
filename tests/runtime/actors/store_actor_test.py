import os
import random
import subprocess
import sys

import pytest

from tff_dpftrl.runtime.actors import actor, events, factory, messages
from tff_dpftrl.runtime.store import holders, sql
from verification import memory_store
from verification.schedules import simulation

SERVED = simulation.small_population()  # The lease is of 8 seconds.
OPTIONS = {"selectors": ("s0",), "pace": lambda *_: (0.0,)}
FACTORY = factory.ActorFactory(SERVED, **OPTIONS)


def make(store=None, **options):
    store = store or memory_store.MemoryStore()
    for task in SERVED.tasks:
        store.add_task(SERVED.name, task.name, model=b"first", state=b"seed")
    made = factory.ActorFactory(SERVED, **OPTIONS, **options).store_actor(store)
    assert made.start(0.0) == []
    return made, store


def commit(epoch=1, round_index=0, metrics=None):
    return messages.CommitRound(
        "attempt", epoch, "training", round_index, b"model", b"state", metrics or {"loss": 1.0}
    )


def test_leases_are_given_renewed_and_refused():
    made, store = make()
    assert made.step(10.0, messages.AcquireLease("a", 7.0)) == [
        actor.Send("a", messages.LeaseGranted(1, 7.0))
    ]
    assert store.lease(SERVED.name).expires_at == 18.0
    (refused,) = made.step(11.0, messages.AcquireLease("b", 11.0))
    assert (refused.to, refused.message.epoch) == ("b", 0)
    assert "led by 'a, process" in refused.message.reason
    assert made.step(12.0, messages.RenewLease("a", 1, 11.5)) == [
        actor.Send("a", messages.LeaseGranted(1, 11.5))
    ]
    assert made.step(13.0, messages.ReleaseLease("a", 1)) == []
    assert made.step(13.0, messages.AcquireLease("b", 13.0))[0].message.epoch == 2
    (lost,) = made.step(13.0, messages.RenewLease("a", 1, 13.0))
    assert (lost.to, lost.message.epoch) == ("a", 1)


def test_a_lease_that_is_to_be_left_to_others_is_released_and_not_given():
    yields = False
    made, store = make(yields=lambda: yields)
    made.step(10.0, messages.AcquireLease("a", 10.0))
    yields = True
    (lost,) = made.step(11.0, messages.RenewLease("a", 1, 11.0))
    assert (lost.to, lost.message.epoch) == ("a", 1)
    assert isinstance(lost.message, messages.LeaseRefused)
    assert store.lease(SERVED.name).owner == ""
    (refused,) = made.step(11.0, messages.AcquireLease("b", 11.0))
    assert refused == actor.Send("b", messages.LeaseRefused(0, lost.message.reason))
    (stored,) = made.step(11.0, commit())  # Nobody has led since.
    assert isinstance(stored.message, messages.RoundStored)
    yields = False
    assert made.step(12.0, messages.AcquireLease("b", 12.0))[0].message.epoch == 2
    (stale,) = made.step(12.0, commit(round_index=1))
    assert isinstance(stale.message, messages.CommitRefused)


def test_the_lease_of_a_process_that_has_ended_is_taken_over_at_once(monkeypatch):
    ticks = {os.getpid(): 7}  # Of the processes that live, by id.
    monkeypatch.setattr(holders, "host_digest", lambda: "a" * 32)
    monkeypatch.setattr(holders, "start_tick", ticks.get)
    epochs = []

    def granted(holder):
        """Whether a lease that another name holds is granted before it ends."""
        made, store = make()
        store.acquire(SERVED.name, holder, now=0.0, duration=8.0)
        (answer,) = made.step(1.0, messages.AcquireLease("b", 1.0))
        epochs.append(answer.message.epoch)
        return isinstance(answer.message, messages.LeaseGranted)

    ticks[12] = 500
    here = "on " + "a" * 32
    assert not granted(f"p/coordinator/a, process 12 since tick 500 {here}")  # It lives.
    assert not granted(f"a, process 13 since tick 500 on {'b' * 32}")  # On another machine.
    assert not granted("p/coordinator/a")  # Of an earlier version.
    assert granted(f"p/coordinator/a, process 13 since tick 500 {here}")
    assert granted(f"a, process 12 since tick 499 {here}")  # Another one has its id now.
    assert epochs == [0, 0, 0, 2, 2]

    def unreadable(pid):
        raise PermissionError(pid)

    monkeypatch.setattr(holders, "start_tick", unreadable)
    assert not granted(f"a, process 13 since tick 500 {here}")
    monkeypatch.undo()
    monkeypatch.setattr(holders, "host_digest", lambda: "")  # No /proc, as on other systems.
    assert not granted(f"a, process 13 since tick 500 on {''}")


def test_a_process_that_is_killed_leaves_its_lease_to_the_next_one(tmp_path):
    store = sql.SqlStore(tmp_path)
    made, _ = make(store)
    code = f"""
import sys
from tff_dpftrl.runtime.store import holders, sql
with sql.SqlStore({str(tmp_path)!r}) as store:
    store.acquire({SERVED.name!r}, holders.name_of("a"), now=0.0, duration=8.0)
print("leads", flush=True)
sys.stdin.read()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as leader:
        assert leader.stdout.readline() == "leads\n"
        (refused,) = made.step(1.0, messages.AcquireLease("b", 1.0))
        assert f"led by 'a, process {leader.pid} since tick" in refused.message.reason
        leader.kill()
    (granted,) = made.step(1.0, messages.AcquireLease("b", 1.0))
    assert granted == actor.Send("b", messages.LeaseGranted(2, 1.0))
    assert store.lease(SERVED.name).owner == holders.name_of("b") != "b"
    store.close()


def test_commits_are_read_made_and_refused():
    made, store = make()
    made.step(0.0, messages.AcquireLease("a", 0.0))
    (stored,) = made.step(5.0, commit())
    assert stored == actor.Send(
        "attempt", messages.RoundStored(store.last_commit(SERVED.name, "training"))
    )
    assert store.history(SERVED.name, "training")[0]["committed_at"] == 5.0
    (read,) = made.step(5.0, messages.ReadCommits("a", 4, ("training", "evaluation")))
    assert read.message.request == 4
    assert [one.rounds_done for one in read.message.commits] == [1, 0]
    for refused in (commit(), commit(round_index=1, epoch=2), commit(round_index=2)):
        (answer,) = made.step(6.0, refused)
        assert answer.to == "attempt" and isinstance(answer.message, messages.CommitRefused)
    assert store.last_commit(SERVED.name, "training").rounds_done == 1


def test_metrics_that_cannot_be_kept_do_not_leave_by_the_reason():
    made, _ = make()
    made.step(0.0, messages.AcquireLease("a", 0.0))
    (answer,) = made.step(5.0, commit(metrics={"loss": b"secret so far", "other": 12345}))
    assert "'loss'" in answer.message.reason
    assert "secret" not in answer.message.reason and "12345" not in answer.message.reason


def test_a_store_that_fails_is_reported_and_the_round_given_up(tmp_path):
    store = sql.SqlStore(tmp_path)
    made, _ = make(store)
    made.step(0.0, messages.AcquireLease("a", 0.0))
    with store._engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE commits")
    effects = made.step(1.0, commit())
    assert [effect.to for effect in effects] == [events.OBSERVER, "attempt"]
    assert "Cannot write to the store" in effects[0].message.reason
    effects = made.step(1.0, messages.ReadCommits("a", 1, ("training",)))
    assert [effect.to for effect in effects] == [events.OBSERVER]
    store.close()


def test_a_missing_task_is_reported():
    made = FACTORY.store_actor(memory_store.MemoryStore())
    (reply,) = made.step(1.0, messages.ReadCommits("a", 1, ("training",)))
    assert reply.to == events.OBSERVER and "no task 'training'" in reply.message.reason


def test_the_cast_knows_its_roles_only():
    with pytest.raises(TypeError, match="no actor for the role"):
        FACTORY.build("x", "a string", random.Random(0))
