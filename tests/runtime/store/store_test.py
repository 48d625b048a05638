"""The laws of a store, the same for every backend."""

import math
import threading

import pytest

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.store import interface, sql
from verification import memory_store

FIRST = {"model": b"model 0", "state": b"state 0"}

server = postgresql.server


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request, tmp_path):
    if request.param == "memory":
        made = memory_store.MemoryStore()
    elif request.param == "sqlite":
        made = sql.SqlStore(tmp_path / "store")
    else:
        made = sql.SqlStore(request.getfixturevalue("server").new_database())
    with made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where stores of several processes meet."""
    if request.param == "sqlite":
        return tmp_path / "store"
    return request.getfixturevalue("server").new_database()


def commit(store, round_index, epoch, task="task", **changes):
    given = {
        "model": f"model {round_index + 1}".encode(),
        "state": f"state {round_index + 1}".encode(),
        "metrics": {"loss": 1 / (round_index + 1)},
        "now": 100.0 + round_index,
    }
    return store.commit(
        "keyboard", task, round_index=round_index, epoch=epoch, **{**given, **changes}
    )


def test_a_lease_has_one_holder_until_it_ends(store):
    assert store.lease("keyboard") is None
    lease = store.acquire("keyboard", "a", now=10.0, duration=5.0)
    assert lease == interface.Lease("keyboard", "a", 1, 15.0) == store.lease("keyboard")
    with pytest.raises(interface.LeaseHeld, match="'keyboard' is led by 'a' for at least 1 more"):
        store.acquire("keyboard", "b", now=14.0, duration=5.0)
    assert store.lease("keyboard") == lease
    taken = store.acquire("keyboard", "b", now=15.0, duration=5.0)
    assert (taken.owner, taken.epoch) == ("b", 2)


def test_who_asks_again_keeps_its_epoch_while_it_holds_the_lease(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    again = store.acquire("keyboard", "a", now=4.0, duration=5.0)
    assert (again.epoch, again.expires_at) == (1, 9.0)
    assert store.acquire("keyboard", "a", now=9.0, duration=5.0).epoch == 2


def test_renewal_prolongs_only_what_has_not_ended(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    assert store.renew("keyboard", "a", 1, now=4.0, duration=5.0).expires_at == 9.0
    with pytest.raises(interface.LeaseHeld):
        store.acquire("keyboard", "b", now=8.0, duration=5.0)
    with pytest.raises(interface.LeaseLost, match="'a' has lost the lease"):
        store.renew("keyboard", "a", 1, now=9.0, duration=5.0)
    store.acquire("keyboard", "b", now=9.0, duration=5.0)
    for owner, epoch in (("a", 1), ("a", 2), ("b", 1)):
        with pytest.raises(interface.LeaseLost):
            store.renew("keyboard", owner, epoch, now=10.0, duration=5.0)
    assert store.renew("keyboard", "b", 2, now=10.0, duration=5.0).expires_at == 15.0


def test_nobody_can_renew_what_was_never_held(store):
    with pytest.raises(interface.LeaseLost):
        store.renew("keyboard", "a", 1, now=0.0, duration=5.0)


def test_a_release_frees_the_lease_but_not_its_epoch(store):
    store.acquire("keyboard", "a", now=0.0, duration=50.0)
    store.release("keyboard", "b", 1)
    store.release("keyboard", "a", 7)
    with pytest.raises(interface.LeaseHeld):
        store.acquire("keyboard", "b", now=1.0, duration=5.0)
    store.release("keyboard", "a", 1)
    with pytest.raises(interface.LeaseLost):
        store.renew("keyboard", "a", 1, now=1.0, duration=5.0)
    assert store.acquire("keyboard", "b", now=1.0, duration=5.0).epoch == 2


def test_populations_have_leases_and_tasks_of_their_own(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    assert store.acquire("speech", "b", now=0.0, duration=5.0).epoch == 1
    store.add_task("keyboard", "task", **FIRST)
    store.add_task("speech", "task", model=b"other", state=b"")
    commit(store, 0, 1)
    assert store.last_commit("speech", "task").model == b"other"
    assert store.tasks("keyboard") == store.tasks("speech") == ("task",)
    assert store.tasks("nobody") == ()
    assert store.history("speech", "task") == []


@pytest.mark.parametrize("argument", ["population", "owner", "now", "duration"])
def test_leases_with_senseless_arguments_are_refused(store, argument):
    given = {"population": "keyboard", "owner": "a", "now": 0.0, "duration": 5.0}
    given[argument] = "" if argument in ("population", "owner") else math.nan
    population, owner = given.pop("population"), given.pop("owner")
    with pytest.raises(ValueError, match=argument):
        store.acquire(population, owner, **given)


def test_a_task_goes_on_from_its_last_commit(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    added = store.add_task("keyboard", "task", **FIRST)
    assert added == store.last_commit("keyboard", "task")
    assert (added.rounds_done, added.epoch, added.model) == (0, 0, b"model 0")
    with pytest.raises(interface.TaskExists):
        store.add_task("keyboard", "task", model=b"another", state=b"")
    for t in range(3):
        done = commit(store, t, 1)
        assert done == store.last_commit("keyboard", "task")
        assert (done.rounds_done, done.epoch) == (t + 1, 1)
        assert (done.model, done.state) == (f"model {t + 1}".encode(), f"state {t + 1}".encode())
        assert done.metrics == {"loss": 1 / (t + 1)}


def test_a_round_has_one_attempt_until_it_is_committed(store):
    def begin(attempt, round_index=1, epoch=1, task="task"):
        store.begin_attempt("keyboard", task, round_index=round_index, epoch=epoch, attempt=attempt)

    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.add_task("keyboard", "task", **FIRST)
    assert commit(store, 0, 1).attempt == ""
    for _ in range(2):  # Its first answer may be lost.
        begin("first")
        assert store.last_commit("keyboard", "task").attempt == "first"
    with pytest.raises(interface.RoundUsedUp, match="round 1 of the task 'task'.*: skip the round"):
        begin("second")
    assert store.acquire("keyboard", "b", now=5.0, duration=5.0).epoch == 2
    with pytest.raises(interface.RoundUsedUp):
        begin("second", epoch=2)
    with pytest.raises(interface.StaleEpoch):
        begin("first")
    for round_index in (0, 2):
        with pytest.raises(interface.RoundConflict):
            begin("second", round_index, epoch=2)
    with pytest.raises(interface.UnknownTask):
        begin("second", epoch=2, task="another")
    assert store.last_commit("keyboard", "task").attempt == "first"
    assert commit(store, 1, 2).attempt == ""  # Skipped, for example.
    assert store.last_commit("keyboard", "task").attempt == ""
    begin("second", 2, epoch=2)


def test_bytes_come_back_as_they_were(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.add_task("keyboard", "task", **FIRST)
    every_byte = bytes(range(256)) * 3000
    commit(store, 0, 1, model=every_byte, state=every_byte[::-1])
    last = store.last_commit("keyboard", "task")
    assert (last.model, last.state) == (every_byte, every_byte[::-1])


def test_a_stale_epoch_cannot_commit(store):
    store.add_task("keyboard", "task", **FIRST)
    with pytest.raises(interface.StaleEpoch):
        commit(store, 0, 1)  # Nobody ever led.
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.acquire("keyboard", "b", now=5.0, duration=5.0)
    before = store.last_commit("keyboard", "task")
    for epoch in (1, 3):
        with pytest.raises(interface.StaleEpoch, match=f"Epoch {epoch} cannot commit"):
            commit(store, 0, epoch)
    assert store.last_commit("keyboard", "task") == before
    assert store.history("keyboard", "task") == []
    commit(store, 0, 2)


def test_the_lapse_of_a_lease_alone_stops_no_commit(store):
    # Nobody else leads yet: the next leader will find the commit.
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.add_task("keyboard", "task", **FIRST)
    assert commit(store, 0, 1, now=50.0).rounds_done == 1


@pytest.mark.parametrize("round_index", [0, 2])
def test_only_the_next_round_can_be_committed(store, round_index):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.add_task("keyboard", "task", **FIRST)
    before = commit(store, 0, 1)
    with pytest.raises(interface.RoundConflict, match="1 rounds are done"):
        commit(store, round_index, 1, model=b"another")
    assert store.last_commit("keyboard", "task") == before
    assert len(store.history("keyboard", "task")) == 1


def test_unknown_tasks_are_named(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    for call in (
        lambda: store.last_commit("keyboard", "task"),
        lambda: store.history("keyboard", "task"),
        lambda: commit(store, 0, 1),
    ):
        with pytest.raises(interface.UnknownTask, match="'keyboard' has no task 'task'"):
            call()


def test_the_history_is_one_row_a_round(store):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.add_task("keyboard", "task", **FIRST)
    commit(store, 0, 1, metrics={"loss": math.nan, "histogram": [1, math.inf, 3]})
    store.acquire("keyboard", "b", now=5.0, duration=5.0)
    commit(store, 1, 2, metrics={"loss": 0.5, "accuracy": 0.25})
    assert store.history("keyboard", "task") == [
        {
            "task": "task",
            "round": 0,
            "epoch": 1,
            "committed_at": 100.0,
            "loss": None,
            "histogram": [1, None, 3],
        },
        {
            "task": "task",
            "round": 1,
            "epoch": 2,
            "committed_at": 101.0,
            "loss": 0.5,
            "accuracy": 0.25,
        },
    ]


@pytest.mark.parametrize("metrics", [{"round": 1}, {"loss": object()}, {"loss": b"bytes"}])
def test_metrics_that_cannot_be_kept_are_refused(store, metrics):
    store.acquire("keyboard", "a", now=0.0, duration=5.0)
    store.add_task("keyboard", "task", **FIRST)
    with pytest.raises(ValueError, match="metrics must"):
        commit(store, 0, 1, metrics=metrics)
    assert store.last_commit("keyboard", "task").rounds_done == 0


def test_what_is_printed_of_a_commit_holds_no_state(store):
    added = store.add_task("keyboard", "task", model=b"the weights", state=b"the seed")
    assert "seed" not in repr(added) and "weights" not in repr(added)


def test_another_process_goes_on_from_the_same_commit(place):
    with sql.SqlStore(place) as first:
        first.acquire("keyboard", "a", now=0.0, duration=5.0)
        first.add_task("keyboard", "task", **FIRST)
        done = commit(first, 0, 1)
    with sql.SqlStore(place) as second:
        assert second.last_commit("keyboard", "task") == done
        with pytest.raises(interface.LeaseHeld):
            second.acquire("keyboard", "b", now=1.0, duration=5.0)
        assert second.acquire("keyboard", "b", now=5.0, duration=5.0).epoch == 2


def _at_once(count, action):
    """Runs `action(i)` in threads that start together; their results, in order."""
    together = threading.Barrier(count)
    results = [None] * count

    def run(i):
        together.wait()
        try:
            results[i] = action(i)
        except interface.StoreRefusal as refusal:
            results[i] = refusal

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_many_at_once_one_gets_the_lease_and_one_commits(place):
    count = 8
    stores = _at_once(count, lambda i: sql.SqlStore(place))  # Made at once, too.
    try:
        leases = _at_once(
            count, lambda i: stores[i].acquire("keyboard", f"owner {i}", now=0.0, duration=5.0)
        )
        held = [lease for lease in leases if isinstance(lease, interface.Lease)]
        assert len(held) == 1 and held[0].epoch == 1
        assert sum(isinstance(refused, interface.LeaseHeld) for refused in leases) == count - 1

        added = _at_once(
            count, lambda i: stores[i].add_task("keyboard", "task", model=bytes([i]), state=b"")
        )
        assert sum(isinstance(refused, interface.TaskExists) for refused in added) == count - 1

        for t in range(5):
            done = _at_once(count, lambda i, t=t: commit(stores[i], t, 1, model=bytes([i])))
            kept = [one for one in done if isinstance(one, interface.Commit)]
            assert len(kept) == 1
            assert sum(isinstance(one, interface.RoundConflict) for one in done) == count - 1
            assert stores[0].last_commit("keyboard", "task") == kept[0]
        assert [row["round"] for row in stores[0].history("keyboard", "task")] == list(range(5))
    finally:
        for store in stores:
            store.close()
