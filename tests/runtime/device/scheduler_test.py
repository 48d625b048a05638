"""Tests of tff_dpftrl.runtime.device.scheduler."""

from __future__ import annotations

import collections
import math
import os
import random
import signal
import threading
import time as time_lib

import hypothesis
import pytest
from hypothesis import strategies as st

from tff_dpftrl import durable_files
from tff_dpftrl.runtime.device import backoff, eligibility, scheduler, session

deterministic = hypothesis.settings(deadline=None, derandomize=True)

_NO_REPORT = session.SessionReport("-#", 1.0, 1, {})
_WAITS = backoff.Waits(
    usual_s=1_000.0, first_s=50.0, after_failure_s=10.0, longest_s=5_000.0, longest_turn_s=9_000.0
)
_FAILED = session.SessionOutcome.FAILED


def _result(outcome, *turns):
    return session.SessionResult(outcome, turns, "", _NO_REPORT)


class _Time:
    """A clock that waiting moves."""

    def __init__(self):
        self.now = 500.0
        self.waited = []

    def __call__(self):
        return self.now

    def wait(self, seconds):
        assert seconds > 0
        self.waited.append(seconds)
        self.now += seconds


def _schedule(time, populations=("a",), waits=_WAITS, seed=0):
    return scheduler.Schedule(populations, clock=time, generator=random.Random(seed), waits=waits)


def _wait_after(result, time=None, schedule=None):
    time = _Time() if time is None else time
    schedule = _schedule(time) if schedule is None else schedule
    schedule.finished("a", result)
    return schedule.next_job().seconds


def test_devices_that_start_together_do_not_check_in_together():
    first = [_schedule(_Time(), seed=seed).next_job().seconds for seed in range(400)]
    assert 0 <= min(first) < 2 and 48 < max(first) <= 50
    # Uniform: the mean of 400 has a standard error of 50 / sqrt(12 * 400).
    assert abs(sum(first) / 400 - 25) < 6 * 50 / math.sqrt(12 * 400)


@pytest.mark.parametrize(
    "outcome",
    [
        outcome
        for outcome in session.SessionOutcome
        if outcome not in (*scheduler._FAILURES, session.SessionOutcome.FINISHED)
    ],
)
def test_what_the_server_asks_is_honoured_to_the_second(outcome):
    assert _wait_after(_result(outcome, 123.5)) == 123.5
    assert _wait_after(_result(outcome, 0.0)) == 0.0
    assert _wait_after(_result(outcome, 9_000.0, 1e12)) == 9_000.0
    assert 4_500.0 <= _wait_after(_result(outcome, 1e12)) <= 9_000.0
    assert _wait_after(_result(outcome, -7.0)) == 0.0


def test_a_finished_population_is_asked_rarely():
    time = _Time()
    made = _schedule(time, ["a", "b"])
    finished = _result(session.SessionOutcome.FINISHED, 5.0)
    made.finished("a", finished)
    assert not made.is_finished
    made.finished("b", finished)
    assert made.is_finished and 2_500.0 <= made.next_job().seconds <= 5_000.0
    made.finished("a", _result(session.SessionOutcome.COMPLETED, 7.0))  # A new task.
    assert not made.is_finished and made.next_job().seconds == 7.0


def test_without_a_word_of_the_server_it_is_the_usual_time():
    for outcome in (session.SessionOutcome.COMPLETED, session.SessionOutcome.REPORT_REFUSED):
        assert _wait_after(_result(outcome)) == 1_000.0
        assert _wait_after(_result(outcome, math.nan)) == 1_000.0
    assert 5.0 <= _wait_after(_result(session.SessionOutcome.INTERRUPTED)) <= 10.0


@pytest.mark.parametrize("outcome", scheduler._FAILURES)
def test_failures_wait_twice_as_long_each_until_one_session_works(outcome):
    time = _Time()
    schedule = _schedule(time)
    for failures in range(14):
        limit = min(5_000.0, 10.0 * 2**failures)
        assert limit / 2 <= _wait_after(_result(outcome), time, schedule) <= limit
    assert _wait_after(_result(session.SessionOutcome.NOT_SELECTED, 7.0), time, schedule) == 7.0
    assert 5.0 <= _wait_after(_result(outcome), time, schedule) <= 10.0


def test_a_failure_never_anticipates_what_the_server_asked():
    assert _wait_after(_result(_FAILED, 600.0)) == 600.0
    assert _wait_after(_result(_FAILED, 0.0, 600.0)) == 600.0
    assert 5.0 <= _wait_after(_result(_FAILED, 0.0)) <= 10.0


def test_devices_that_failed_together_do_not_return_together():
    waits = [_WAITS.back_off_s(3, random.Random(seed)) for seed in range(400)]
    assert 20 <= min(waits) < 21 and 39 < max(waits) <= 40
    assert _WAITS.back_off_s(10**9, random.Random(0)) <= 5_000.0


@deterministic
@hypothesis.given(
    st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.0, 3.0, 40.0]), min_size=1, max_size=60)
)
def test_whoever_waits_longest_is_next(count, asked):
    time = _Time()
    due = {f"p{i}": time.now for i in range(count)}
    schedule = _schedule(time, due, waits=backoff.Waits(first_s=0.0))
    overtaken = collections.Counter()
    for seconds in asked:
        job = schedule.next_job()
        if job.seconds:
            time.wait(job.seconds)
        chosen = job.population
        assert due[chosen] == min(due.values())
        assert time.now >= due[chosen] - 1e-9
        for name in due:
            if name != chosen and due[name] <= time.now:
                overtaken[name, chosen] += 1
                assert overtaken[name, chosen] <= 1  # One session of each other, at most.
            overtaken[chosen, name] = 0
        time.now += 5.0  # The session itself.
        schedule.finished(chosen, _result(session.SessionOutcome.NOT_SELECTED, seconds))
        due[chosen] = time.now + seconds


def test_those_who_always_want_more_take_turns():
    time = _Time()
    schedule = _schedule(time, "abc")
    time.now += 50.0
    order = []
    for _ in range(12):
        job = schedule.next_job()
        assert job.seconds == 0
        order.append(job.population)
        time.now += 1.0
        schedule.finished(job.population, _result(session.SessionOutcome.COMPLETED, 0.0))
    assert all(set(order[i : i + 3]) == set("abc") for i in range(0, 12, 3))
    assert order[:3] * 4 == order


def _run_jobs(time, sessions, *, settable=None, lock_file=None, stop_at=10_000.0, populations="a"):
    """Runs until `stop_at`; `sessions` yields (seconds that it takes, result)."""
    log, running = [], []

    def run_session(population):
        assert not running, "two sessions at a time"
        running.append(population)
        seconds, result = next(sessions)
        log.append((time.now, population))
        time.now += seconds
        running.pop()
        return result

    scheduler.run_jobs(
        _schedule(time, populations),
        run_session,
        settable or eligibility.SettableEligibility(),
        wait=time.wait,
        should_stop=lambda: time.now >= stop_at,
        lock_file=lock_file,
        look_again_s=30.0,
    )
    return log


def test_the_loop_runs_sessions_when_they_are_due():
    results = iter([(20.0, _result(session.SessionOutcome.COMPLETED, 300.0))] * 100)
    log = _run_jobs(_Time(), results, stop_at=2_000.0)
    gaps = [b[0] - a[0] for a, b in zip(log, log[1:], strict=False)]
    assert len(log) == 5 and gaps == pytest.approx([320.0] * 4)


def test_the_first_turn_is_taken_at_which_the_device_may_work():
    time, settable = _Time(), eligibility.SettableEligibility()
    plain_wait = time.wait

    def wait(seconds):
        plain_wait(seconds)
        settable.charging = not 600.0 <= time.now < 1_000.0

    time.wait = wait
    # Turns at some 700, 800, 900 and 1,200 seconds: the device comes neither at the first
    # three nor at 1,000, when it may work again.
    turns = _result(session.SessionOutcome.COMPLETED, 200.0, 300.0, 400.0, 700.0)
    log = _run_jobs(
        time, iter([(0.0, turns), (0.0, _result(session.SessionOutcome.COMPLETED))]),
        settable=settable, stop_at=2_000.0,
    )  # fmt: skip
    assert [moment - log[0][0] for moment, _ in log] == pytest.approx([0.0, 700.0])


def test_devices_that_missed_all_turns_do_not_come_together_when_they_may_work():
    came = []
    for seed in range(400):
        time = _Time()
        schedule = _schedule(time, seed=seed)
        while schedule.next_job().seconds:
            time.wait(schedule.next_job().seconds)
        # Nobody may work before the moment 20,000, and everybody from then on.
        while time.now < 20_000.0:
            schedule.missed("a")
            seconds = schedule.next_job().seconds
            assert 0 < seconds <= 1_000.0
            time.wait(seconds)
        came.append(time.now - 20_000.0)
    assert max(sum(t <= x < t + 100.0 for x in came) for t in range(0, 1_000, 20)) < 0.3 * 400


def test_devices_that_missed_all_turns_of_a_large_population_wait_as_long_as_between_them():
    waits = []
    for seed in range(400):
        time = _Time()
        schedule = _schedule(time, seed=seed)
        schedule.finished("a", _result(session.SessionOutcome.COMPLETED, 2_000.0, 8_000.0))
        time.wait(8_000.0)
        schedule.missed("a")
        waits.append(schedule.next_job().seconds)
    # Uniform up to 8,000: six standard errors of the mean are 693.
    assert max(waits) <= 8_000.0 and abs(sum(waits) / 400 - 4_000.0) < 693


def test_a_device_that_rests_takes_the_next_of_its_turns():
    time = _Time()
    schedule = _schedule(time)
    schedule.finished("a", _result(session.SessionOutcome.NOT_SELECTED, 20.0, 50.0))
    time.now += 20.0
    resting = _result(session.SessionOutcome.RESTING)
    assert _wait_after(resting, time, schedule) == 30.0
    time.now += 30.0
    assert _wait_after(resting, time, schedule) == _WAITS.usual_s


def test_a_hostile_number_of_turns_is_not_kept():
    time = _Time()
    schedule = _schedule(time)
    schedule.finished("a", _result(session.SessionOutcome.COMPLETED, *map(float, range(10_000))))
    assert len(schedule._appointments["a"].turns) == 100


def test_one_process_of_the_device_has_a_session(tmp_path):
    lock_file = tmp_path / "lock"
    ready_reader, ready_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with durable_files.locked(lock_file) as is_ours:
            os.write(ready_writer, b"y" if is_ours else b"n")
            signal.pause()  # Until it is killed, in the middle of its session.
    os.close(ready_writer)
    assert os.read(ready_reader, 1) == b"y"
    os.close(ready_reader)
    done = iter([(1.0, _result(session.SessionOutcome.COMPLETED, 1e4))] * 9)
    assert _run_jobs(_Time(), done, lock_file=lock_file, stop_at=900.0) == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(_run_jobs(_Time(), done, lock_file=lock_file, stop_at=900.0)) == 1
    assert lock_file.stat().st_mode & 0o777 == 0o600


def test_an_error_of_the_runtime_itself_frees_the_lock(tmp_path):
    def sessions():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        _run_jobs(_Time(), sessions(), lock_file=tmp_path / "lock")
    done = iter([(1.0, _result(session.SessionOutcome.COMPLETED, 1e5))])
    assert len(_run_jobs(_Time(), done, lock_file=tmp_path / "lock", stop_at=900.0)) == 1


class _Held:
    """Sessions that a server holds until a test selects the device for them."""

    def __init__(self):
        self.turn = session.Turn()
        self.waiting, self.training, self.log = set(), [], []
        self._selected = {name: threading.Event() for name in "ab"}

    def select(self, population):
        self._selected[population].set()

    def run(self, population):
        self.waiting.add(population)

        def keep_going():
            if self.turn.is_over:
                raise InterruptedError

        try:
            while not self._selected[population].wait(0.005):
                keep_going()
            with self.turn.taken(keep_going):
                self.waiting.discard(population)
                self.training.append(population)
                assert len(self.training) == 1, "two trainings at a time"
                time_lib.sleep(0.02)
                self.training.remove(population)
        except InterruptedError:
            self.log.append(f"{population} interrupted")
            return _result(session.SessionOutcome.INTERRUPTED)
        self._selected[population].clear()
        self.log.append(population)
        return _result(session.SessionOutcome.COMPLETED, 0.0)


def _run_two(run_session, should_stop, turn):
    """Runs sessions of two populations, which begin at once and may wait side by side."""
    waits = backoff.Waits(first_s=0.0)
    scheduler.run_jobs(
        scheduler.Schedule("ab", clock=time_lib.monotonic, generator=random.Random(0), waits=waits),
        run_session,
        eligibility.SettableEligibility(),
        wait=time_lib.sleep,
        should_stop=should_stop,
        turn=turn,
    )


def _run_held(held, should_stop):
    _run_two(held.run, should_stop, held.turn)


def test_a_population_whose_server_holds_the_device_does_not_hold_up_another_one():
    held = _Held()

    def should_stop():
        if len(held.log) < 5 and "b" in held.waiting:
            held.select("b")  # And never for the first one.
        return len(held.log) >= 5

    _run_held(held, should_stop)
    assert held.log == ["b"] * 5 + ["a interrupted"]


def test_a_device_that_is_selected_in_two_populations_trains_for_one_after_the_other():
    held = _Held()

    def should_stop():
        if held.waiting == {"a", "b"}:
            held.select("a")
            held.select("b")
        return len(held.log) >= 4

    _run_held(held, should_stop)
    assert {"a", "b"} <= set(held.log[:4])


def test_no_session_begins_while_another_one_trains(monkeypatch):
    monkeypatch.setattr(scheduler, "_LOOK_S", 0.01)
    turn, begun, looks = session.Turn(), [], []
    is_reported = threading.Event()

    def run_session(population):
        begun.append(population)
        if len(begun) == 1:
            with turn.taken(lambda: None):
                is_training.set()
                is_reported.wait(10)
        return _result(session.SessionOutcome.COMPLETED, 1e3)

    is_training = threading.Event()

    def should_stop():
        if not looks:  # Before the first session.
            looks.append(0)
            return False
        is_training.wait(10)  # Before the next one may begin.
        looks.append(len(begun))
        if len(looks) == 6:
            is_reported.set()
        return len(begun) == 2

    _run_two(run_session, should_stop, turn)
    assert looks[:6] == [0] + [1] * 5 and sorted(begun) == ["a", "b"]


def test_an_error_of_a_session_in_a_thread_ends_the_loop_and_the_other_sessions():
    held = _Held()
    run = held.run

    def run_session(population):
        if population == "b":
            raise OSError("the disk is gone")
        return run(population)

    held.run = run_session
    with pytest.raises(OSError, match="the disk is gone"):
        _run_held(held, lambda: False)
    assert held.log in ([], ["a interrupted"])
    assert held.turn.is_over


@pytest.mark.parametrize("populations", [(), ("a", "a")])
def test_bad_populations_are_named(populations):
    with pytest.raises(ValueError, match="populations"):
        _schedule(_Time(), populations)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"usual_s": 0}, "usual_s"),
        ({"first_s": -1}, "first_s"),
        ({"after_failure_s": 0}, "after_failure_s"),
        ({"longest_s": 29}, "longest_s"),
        ({"longest_turn_s": 0.0}, "longest_turn_s"),
    ],
)
def test_bad_waits_are_named(changed, name):
    with pytest.raises(ValueError, match=name):
        backoff.Waits(**changed)
