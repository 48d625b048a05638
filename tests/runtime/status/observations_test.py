import random
import tracemalloc

import pytest

from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events


def levels(seen):
    return tuple(seen.series.total(name) for name in ("connected", "waiting", "participating"))


def test_devices_are_followed_from_state_to_state():
    told = watched.Watched()
    seen = told.seen
    for _ in range(8):
        seen.session_opened()
    assert levels(seen) == (8, 0, 0)
    for _ in range(6):
        seen.waiting()
    seen.session_refused("expired token")
    seen.session_closed("refused")
    seen.session_closed("connecting")
    assert levels(seen) == (6, 6, 0)
    seen.sent_away("enough devices are waiting", True)
    seen.session_closed("sent away")
    seen.session_closed("waiting")
    for _ in range(3):
        seen.configured("train", 10)
    assert levels(seen) == (4, 1, 3)
    told.report(count=1)
    told.report(count=1, refusal="late")
    told.drop()
    assert levels(seen) == (1, 1, 0)
    dropped = [
        seen.series.total(f"dropped_{phase}")
        for phase in ("connecting", "waiting", "participating")
    ]
    assert dropped == [1, 1, 1]
    assert seen.refused_sessions.items() == [("expired token", 1)]


def test_who_is_sent_away_before_it_waits_does_not_leave_the_waiting():
    seen = watched.Watched().seen
    seen.session_opened()
    seen.waiting()
    seen.session_opened()
    seen.sent_away("too many devices check in", False)
    seen.session_closed("sent away")
    assert levels(seen) == (1, 1, 0)


def test_a_round_goes_through_its_phases():
    told = watched.Watched(num_rounds=1)
    task = told.seen.tasks["train"]
    told.lead()
    assert (task.phase, task.rounds_done) == ("waiting for devices", None)
    told.on_event(events.TooFewDevices("train", 2, 4))
    assert task.phase == "too few devices"
    told.begin()
    assert task.phase == "reporting"
    told.clock.now += 3
    told.report(count=3)
    assert (task.attempt.devices, task.attempt.reports) == (5, 3)
    told.clock.now += 5
    told.report()
    assert task.phase == "committing"
    told.report(refusal="late")
    told.clock.now += 2
    told.commit()
    assert (task.phase, task.rounds_done, task.committed) == ("over", 1, 1)
    assert task.last_commit_at == watched.START + 10
    assert task.reports["accepted"] == 4 and task.reports["late"] == 1
    assert (task.bytes_sent, task.bytes_received) == (5000, 500)
    assert task.round_seconds.quantile(0.5) == pytest.approx(10, rel=0.1)
    assert task.report_seconds.sum == 3 * 3 + 8


def test_lost_attempts_are_counted_by_reason():
    told = watched.Watched()
    for reason in ("too few reports", "all Aggregators are lost", "too few reports"):
        told.begin()
        told.lose(reason=reason)
    task = told.seen.tasks["train"]
    assert task.attempt is None
    assert task.abandoned.items() == [("too few reports", 2), ("all Aggregators are lost", 1)]
    assert told.seen.series.total("abandoned") == 3
    assert task.rounds_done == 0


def test_what_a_new_coordinator_repeats_is_counted_once():
    told = watched.Watched()
    told.lead()
    told.round()
    released = events.RoundReleased("train", 0, "attempt 1", {})
    told.lead(2)
    told.on_event(released)
    told.on_event(released)
    task = told.seen.tasks["train"]
    assert (task.committed, task.rounds_done, task.round_seconds.count) == (1, 1, 1)
    assert (told.seen.epoch, told.seen.leaders) == (2, 2)
    assert told.seen.series.total("committed") == 1


def test_rounds_of_an_earlier_server_are_done_but_not_counted_anew():
    told = watched.Watched()
    told.on_event(events.RoundReleased("train", 41, "of yesterday", {}))
    task = told.seen.tasks["train"]
    assert (task.rounds_done, task.committed, task.last_commit_at) == (42, 0, None)
    told.rounds["train"] = 42
    told.round()
    assert (task.rounds_done, task.committed) == (43, 1)


def test_a_commit_that_nobody_told_of_is_known_from_the_next_round():
    told = watched.Watched()
    told.round()
    told.rounds["train"] = 2
    told.begin()
    assert told.seen.tasks["train"].rounds_done == 2


def test_a_round_may_be_lost_and_committed_after_all():
    told = watched.Watched()
    told.begin()
    told.report(count=4)
    told.lose(reason="its Master Aggregator is lost")
    told.commit()
    task = told.seen.tasks["train"]
    assert (task.committed, task.abandoned.total(), task.attempt) == (1, 1, None)


def test_attempts_of_a_coordinator_that_is_gone_are_over():
    told = watched.Watched("train", "evaluate")
    told.lead()
    told.begin()
    told.lead(2)
    task = told.seen.tasks["train"]
    assert task.attempt is None
    assert task.abandoned.items() == [("its Coordinator is lost", 1)]
    assert told.seen.tasks["evaluate"].abandoned.total() == 0


def test_texts_from_outside_become_no_labels():
    told = watched.Watched()
    seen = told.seen
    told.begin()
    for i in range(1000):
        told.tell(shape=f"shape {i}", versions={"tff_dpftrl": f"0.{i}", f"key {i}": "1"})
        told.tell(versions={"tff_dpftrl": "<b>" + "x" * i})
        seen.reported("train", f"unusable: value {i}", 10)
        seen.reported(f"task {i}", f"reason {i}", 10)
        seen.reported("train", f"reason {i}", 10)
        seen.session_refused(f"reason {i}")
        told.on_event(events.RoundLost("train", 0, f"attempt {i}", f"reason {i}", {}))
        told.on_event(events.RoundBegan(f"task {i}", 0, "attempt", 1))
    assert [shape for shape, _, _ in seen.session_table.rows()] == ["-v[]+^", "other"]
    assert set(seen.versions) == {"tff_dpftrl", "tensorflow", "python", "system"}
    assert len(seen.versions["tff_dpftrl"].items()) <= 13
    assert seen.versions["tff_dpftrl"].items()[0][0] == "other"
    assert len(seen.refused_sessions.items()) <= 30
    assert list(seen.tasks) == ["train"]
    reports = seen.tasks["train"].reports
    assert reports["unusable"] == 1000 and reports["other"] == 1000
    assert len(seen.tasks["train"].abandoned.items()) <= 13


def test_failures_of_the_store_are_counted_without_their_text():
    told = watched.Watched()
    told.on_event(events.StoreFailed("postgresql://user:secret@host"))
    assert told.seen.series.total("store_failures") == 1
    assert told.seen.last_store_failure_at == watched.START
    assert "secret" not in repr(vars(told.seen))


def test_only_sessions_that_got_a_plan_have_a_duration():
    told = watched.Watched()
    for shape in ("-#", "!", "nonsense", "-v[!"):
        told.tell(shape, seconds=7.0)
    assert (told.seen.session_seconds.count, told.seen.session_seconds.sum) == (1, 7.0)


def test_counts_of_sessions_last_over_a_restart(tmp_path):
    told = watched.Watched()
    for shape in ("-v[]+^", "-v[]+^", "-v[!"):
        told.tell(shape)
    told.seen.save_counts(tmp_path / "sessions.json")
    again = watched.Watched()
    again.seen.load_counts(tmp_path / "sessions.json")
    again.tell("-v[!")
    assert [(shape, count) for shape, count, _ in again.seen.session_table.rows()] == [
        ("-v[!", 2),
        ("-v[]+^", 2),
    ]


def test_memory_does_not_grow_with_devices_or_rounds():
    told = watched.Watched()
    rng = random.Random(0)

    def rounds(count):
        for _ in range(count):
            told.round(seconds=rng.uniform(1, 5000), dropped=rng.randrange(4))
            told.tell(rng.choice(["-v[]+^", "-v[!", "x"]), seconds=rng.uniform(0, 100))

    rounds(500)
    tracemalloc.start()
    try:
        rounds(10)
        before, _ = tracemalloc.get_traced_memory()
        rounds(1000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000  # 5,000 devices.
