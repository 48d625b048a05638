"""Tests of tff_dpftrl.runtime.device.participation_timer."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat

import hypothesis
import pytest
from hypothesis import strategies as st

from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import participation_timer, private_database

deterministic = hypothesis.settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)

_BUCKETS = histograms.ParticipationBuckets((1, 2, 4, 8), (1, 2, 3))
_RULE = participation_timer.ParticipationRule(min_sep=3, max_participations=3, min_hours=2.0)


@pytest.fixture(autouse=True, scope="module")
def _no_power_cuts():
    """Tests kill processes, not the machine: they need not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_database, "_SYNCHRONOUS", "OFF")
        yield


class _Clock:
    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture(name="clock")
def _clock():
    return _Clock()


@pytest.fixture(name="timer", params=["in a file", "in memory"])
def _timer(request, tmp_path, clock):
    if request.param == "in memory":
        yield participation_timer.MemoryTimer(clock)
        return
    timer = participation_timer.ParticipationTimer.open(tmp_path / "timer", clock=clock)
    yield timer
    timer.close()


def _record(timer, round_index, rule=_RULE, task="t", population="p"):
    return timer.record(population, task, round_index, rule, _BUCKETS)


def test_the_first_time_is_never_before(timer):
    timer.check("p", "t", 5, _RULE)
    strides, times = _record(timer, 5)
    assert strides.tolist() == [1, 0, 0, 0, 0]
    assert times.tolist() == [1, 0, 0]


def test_later_times_tell_stride_and_number(timer, clock):
    _record(timer, 5)
    clock.now += 7_200
    strides, times = _record(timer, 10)
    assert strides.tolist() == [0, 0, 0, 1, 0]  # A stride of 5 is in the bucket 4 ... 7.
    assert times.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("round_index", "hours", "reason"),
    [
        (5, 9, "round 5 is 0 after the last one of this device, 5, and min_sep=3"),
        (7, 9, "round 7 is 2 after"),
        (2, 9, "round 2 is -3 after"),
        (9, 1.9, "took part 1.9 hours ago, and min_hours=2"),
        (9, -1.0, "the clock is 3600 s behind"),
    ],
)
def test_early_work_is_refused_and_not_recorded(timer, clock, round_index, hours, reason):
    _record(timer, 5)
    begin = clock.now
    clock.now += 3_600 * hours
    with pytest.raises(participation_timer.TimerRefusal, match=reason):
        timer.check("p", "t", round_index, _RULE)
    with pytest.raises(participation_timer.TimerRefusal, match=reason):
        _record(timer, round_index)
    clock.now = begin + 7_200
    assert _record(timer, 8)[1].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("round_index", "hours", "wait_hours"),
    [
        (6, 1.0, 2.0),  # One round took an hour, and two are left.
        (7, 4.0, 2.0),
        (5, 0.5, 1.5),  # No round has come since; the rule's hours count.
        (9, 1.5, 0.5),
    ],
)
def test_a_device_that_rests_knows_how_long_about(timer, clock, round_index, hours, wait_hours):
    _record(timer, 5)
    clock.now += 3_600 * hours
    with pytest.raises(participation_timer.TimerRefusal) as caught:
        timer.check("p", "t", round_index, _RULE)
    assert caught.value.wait_s == pytest.approx(3_600 * wait_hours)


def test_the_largest_number_of_times_is_kept(timer, clock):
    for round_index in (0, 3, 6):
        _record(timer, round_index)
        clock.now += 7_200
    with pytest.raises(participation_timer.TimerRefusal, match="3 times, and max_participations=3"):
        timer.check("p", "t", 100, _RULE)


def test_a_clock_that_was_set_back_and_right_again_gives_nothing_away(timer, clock):
    _record(timer, 0)
    clock.now -= 1e9  # As a machine without a battery of its own begins after a loss of power.
    for _ in range(3):
        clock.now += 7_200
        with pytest.raises(participation_timer.TimerRefusal, match="clock"):
            timer.check("p", "t", 50, _RULE)
    clock.now += 1e9 - 3 * 7_200 + 7_199
    with pytest.raises(participation_timer.TimerRefusal, match="2.0 hours ago"):
        timer.check("p", "t", 50, _RULE)
    clock.now += 1
    timer.check("p", "t", 50, _RULE)


def test_without_hours_the_clock_does_not_matter(timer, clock):
    rule = participation_timer.ParticipationRule(min_sep=3, max_participations=3)
    _record(timer, 0, rule)
    clock.now -= 100
    _record(timer, 3, rule)
    clock.now += 100 + 7_199  # The later of the two times is kept, for a rule that needs it.
    with pytest.raises(participation_timer.TimerRefusal, match="hours"):
        _record(timer, 6, _RULE)


def test_tasks_and_populations_have_timers_of_their_own(timer):
    for population, task in (("p", "t"), ("p", "u"), ("q", "t")):
        assert _record(timer, 0, task=task, population=population)[0][0] == 1
        with pytest.raises(participation_timer.TimerRefusal, match=f"{population}/{task}"):
            timer.check(population, task, 1, _RULE)


def test_it_survives_a_restart_and_is_for_its_owner_only(tmp_path, clock):
    path = tmp_path / "timer"
    timer = participation_timer.ParticipationTimer.open(path, clock=clock)
    _record(timer, 5)
    timer.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    timer = participation_timer.ParticipationTimer.open(path, clock=clock)
    with pytest.raises(participation_timer.TimerRefusal):
        _record(timer, 6)
    timer.close()


def test_what_was_returned_survives_a_kill_at_once(tmp_path, clock):
    path = tmp_path / "timer"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        timer = participation_timer.ParticipationTimer.open(path, clock=clock)
        vectors = _record(timer, 5)
        os.write(writer, bytes(vectors[0].tolist()))  # The report has left.
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.read(reader, 5) == bytes([1, 0, 0, 0, 0])
    os.waitpid(pid, 0)
    timer = participation_timer.ParticipationTimer.open(path, clock=clock)
    with pytest.raises(participation_timer.TimerRefusal, match="round 6 is 1 after"):
        _record(timer, 6)
    timer.close()


def test_one_process_of_several_takes_part_in_a_round(tmp_path, clock):
    path = tmp_path / "timer"
    children = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            timer = participation_timer.ParticipationTimer.open(path, clock=clock)
            try:
                _record(timer, 5)
            except participation_timer.TimerRefusal:
                os._exit(1)
            except BaseException:
                os._exit(2)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sorted(codes) == [0, 1, 1, 1, 1, 1]


def test_nothing_is_returned_that_was_not_written(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(private_database, "_BUSY_S", 0.05)
    path = tmp_path / "timer"
    timer = participation_timer.ParticipationTimer.open(path, clock=clock)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match=f"{path}, a participation timer, was in use by others"):
        _record(timer, 5)
    other.close()
    assert _record(timer, 5)[1].tolist() == [1, 0, 0]
    timer.close()


def test_a_round_that_the_buckets_cannot_tell_is_not_recorded(timer, clock):
    rule = participation_timer.ParticipationRule(1, 10)
    for round_index in range(3):
        _record(timer, round_index, rule)
    with pytest.raises(ValueError, match="times=4 is above the declared 3"):
        _record(timer, 3, rule)
    timer.check("p", "t", 3, rule)


@pytest.mark.parametrize("content", [b"not a database at all, " * 40, b"SQLite format 3\0" * 100])
def test_a_foreign_or_damaged_file_is_refused_and_left_alone(tmp_path, clock, content):
    path = tmp_path / "timer"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)) as refusal:
        participation_timer.ParticipationTimer.open(path, clock=clock)
    assert "\n" not in str(refusal.value)
    assert path.read_bytes() == content


def test_a_damaged_page_is_noticed_before_anything_is_refused_or_allowed(tmp_path, clock):
    path = tmp_path / "timer"
    timer = participation_timer.ParticipationTimer.open(path, clock=clock)
    for task in range(12):
        timer.record("p", f"task {task}" * 100, 0, _RULE, _BUCKETS)
    timer.close()
    content = bytearray(path.read_bytes())
    assert len(content) >= 3 * 4096
    content[8192:12288] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}, a participation timer, is damaged") as refusal:
        participation_timer.ParticipationTimer.open(path, clock=clock)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"min_sep": 0}, "min_sep"),
        ({"max_participations": 0}, "max_participations"),
        ({"min_hours": -1}, "min_hours"),
        ({"min_hours": float("nan")}, "min_hours"),
    ],
)
def test_bad_rules_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        participation_timer.ParticipationRule(
            **{"min_sep": 1, "max_participations": 1, "min_hours": 0, **changed}
        )


@pytest.mark.parametrize("round_index", [-1, 2**31, 1.5])
def test_bad_rounds_are_named(timer, round_index):
    with pytest.raises(ValueError, match="round_index"):
        timer.check("p", "t", round_index, _RULE)


_STEPS = st.lists(
    st.tuples(st.integers(0, 6), st.floats(0, 5), st.booleans()), min_size=1, max_size=15
)


@deterministic
@hypothesis.given(_STEPS, st.integers(1, 6), st.integers(1, 4), st.sampled_from([0.0, 1.0, 6.0]))
def test_what_is_recorded_respects_the_rule(tmp_path_factory, steps, min_sep, most, min_hours):
    rule = participation_timer.ParticipationRule(min_sep, most, min_hours)
    buckets = histograms.ParticipationBuckets.for_schema(schema_lib.MinSep(100, min_sep, most))
    path, clock = tmp_path_factory.mktemp("device") / "timer", _Clock()
    timer = participation_timer.ParticipationTimer.open(path, clock=clock)
    round_index, taken = 0, []
    for rounds, hours, restarts in steps:
        round_index += rounds
        clock.now += hours * 3_600
        if restarts:
            timer.close()
            timer = participation_timer.ParticipationTimer.open(path, clock=clock)
        may = (
            not taken
            or len(taken) < most
            and round_index - taken[-1][0] >= min_sep
            and clock.now - taken[-1][1] >= min_hours * 3_600
        )
        try:
            strides, times = timer.record("p", "t", round_index, rule, buckets)
        except participation_timer.TimerRefusal:
            assert not may
            continue
        assert may
        stride, count = buckets.decode(strides, times)
        if taken:
            assert min_sep <= stride <= round_index - taken[-1][0]
        else:
            assert stride is None
        taken.append((round_index, clock.now))
        assert count >= len(taken)
    timer.close()
