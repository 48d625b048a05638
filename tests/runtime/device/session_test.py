"""Tests of tff_dpftrl.runtime.device.session and session_shape."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import eligibility, participation_timer, session, session_shape
from tff_dpftrl.runtime.device.session_shape import Event

deterministic = hypothesis.settings(deadline=None, derandomize=True)

_RULE = participation_timer.ParticipationRule(min_sep=2, max_participations=3, min_hours=1.0)
_BUCKETS = histograms.ParticipationBuckets((1, 2, 4), (1, 2, 3))
_STEPS = ("check_in", "fetch", "train", "upload")


class _Clock:
    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        return self.now


class _Steps(session.SessionSteps):
    """Steps that do what a test says; `at` maps the name of a step to what happens in it."""

    def __init__(self, device, round_index=7, rule=_RULE, **at):
        self.device, self.at = device, at
        self.work = session.Work("task", round_index, rule, rule and _BUCKETS, plan=None)
        self.uploaded = None
        self.closed = 0

    def _happen(self, name):
        self.device.done.append(name)
        self.device.clock.now += 10.0
        if name in self.at:
            return self.at[name](self.device)
        return None

    def check_in(self, keep_going):
        found = self._happen("check_in")
        keep_going()
        return found

    def fetch(self, keep_going):
        self._happen("fetch")
        keep_going()
        return self.work

    def train(self, work, keep_going):
        assert work is self.work
        self._happen("train")
        keep_going()
        return "update"

    def upload(self, update, participation, keep_going):
        self.uploaded = (update, participation)
        found = self._happen("upload")
        keep_going()
        return found or session.UploadAnswer(True, (60.0,))

    def close(self):
        self.closed += 1
        if "close" in self.at:
            self.at["close"](self.device)


class _Device:
    def __init__(self, folder):
        self.clock = _Clock()
        self.eligibility = eligibility.SettableEligibility()
        self.timer = participation_timer.ParticipationTimer.open(folder / "t", clock=self.clock)
        self.done = []

    def run(self, **options):
        self.done.clear()
        self.steps = _Steps(self, **options)
        result = session.run(
            "population", self.steps, self.timer, self.eligibility, clock=self.clock,
            versions={"tensorflow": "2.14.0"},
        )  # fmt: skip
        assert self.steps.closed == 1
        assert result.report.shape in session_shape.SHAPES
        return result

    def has_participated(self, round_index=7):
        try:
            self.timer.check("population", "task", round_index, _RULE)
        except participation_timer.TimerRefusal:
            return True
        return False


@pytest.fixture(name="device")
def _device(tmp_path):
    device = _Device(tmp_path)
    yield device
    device.timer.close()


def _raise(error):
    def happen(device):
        raise error

    return happen


def test_a_session_that_does_all_it_should(device):
    result = device.run()
    assert result.outcome is session.SessionOutcome.COMPLETED
    assert result.report.shape == "-v[]+^"
    assert result.turns == (60.0,)
    assert device.done == list(_STEPS)
    update, (strides, times) = device.steps.uploaded
    assert update == "update"
    assert strides.tolist() == [1, 0, 0, 0] and times.tolist() == [1, 0, 0]


def test_who_is_not_selected_comes_back(device):
    result = device.run(check_in=lambda _: session.ComeBack((30.0, 90.0), "enough devices"))
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.NOT_SELECTED, "-#")
    assert (result.turns, result.reason) == ((30.0, 90.0), "enough devices")
    assert not device.has_participated()


def test_a_report_that_comes_late_is_a_participation(device):
    result = device.run(upload=lambda _: session.UploadAnswer(False, (40.0,), "late"))
    assert (result.outcome, result.report.shape) == (
        session.SessionOutcome.REPORT_REFUSED,
        "-v[]+#",
    )
    assert result.turns == (40.0,)
    assert device.has_participated()


@pytest.mark.parametrize("error", [ValueError("an example: secret"), OSError(), MemoryError()])
@pytest.mark.parametrize(
    ("step", "shape"),
    [("check_in", "-*"), ("fetch", "-*"), ("train", "-v[*"), ("upload", "-v[]+*")],
)
def test_an_error_ends_the_session_where_it_happened(device, step, shape, error):
    result = device.run(**{step: _raise(error)})
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, shape)
    assert type(error).__name__ in result.reason
    assert "secret" not in str(result.report)
    assert device.done[-1] == step
    assert device.has_participated() == (step == "upload")


def _end_eligibility(device):
    device.eligibility.charging = False


@pytest.mark.parametrize(
    ("step", "shape"),
    [("check_in", "-!"), ("fetch", "-!"), ("train", "-v[!"), ("upload", "-v[]+!")],
)
def test_work_is_given_up_when_the_device_is_no_longer_eligible(device, step, shape):
    result = device.run(**{step: _end_eligibility})
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.INTERRUPTED, shape)
    assert result.reason == "The device is no longer charging."
    assert device.done[-1] == step
    # Before the upload nothing has left: it is no participation.
    assert device.has_participated() == (step == "upload")


def test_steps_that_never_ask_are_stopped_between_steps(device):
    for step in ("check_in", "fetch", "train"):
        device.eligibility = eligibility.SettableEligibility()
        steps = _Steps(device, **{step: _end_eligibility})
        for name in _STEPS:
            plain = getattr(steps, name)
            setattr(steps, name, lambda *args, plain=plain: plain(*args[:-1], lambda: None))
        device.done.clear()
        result = session.run(
            "population", steps, device.timer, device.eligibility, clock=device.clock
        )
        assert result.outcome is session.SessionOutcome.INTERRUPTED
        assert device.done[-1] == step
    assert result.report.shape == "-v[]!"
    assert not device.has_participated()


def test_a_device_that_may_not_work_does_not_even_check_in(device):
    device.eligibility.idle = False
    result = device.run()
    assert (result.report.shape, device.done) == ("!", [])


def test_the_timer_refuses_before_any_training(device):
    device.run(round_index=7)
    device.clock.now += 1e6
    result = device.run(round_index=8)
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.RESTING, "-v!")
    assert device.done == ["check_in", "fetch"]
    assert "round 8 is 1 after" in result.reason
    assert result.turns == (pytest.approx(1e6, rel=1e-3),)  # One round took that long.
    result = device.run(round_index=9)
    assert device.steps.uploaded[1][0].tolist() == [0, 0, 1, 0]
    assert result.outcome is session.SessionOutcome.COMPLETED


def test_another_process_that_was_faster_keeps_the_report_from_leaving(device):
    result = device.run(train=lambda d: d.timer.record("population", "task", 7, _RULE, _BUCKETS))
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.RESTING, "-v[]!")
    assert device.steps.uploaded is None


def test_a_participation_that_cannot_be_written_keeps_the_report_from_leaving(device, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(device.timer, "record", fail)
    result = device.run()
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, "-v[]*")
    assert device.steps.uploaded is None


def test_the_participation_is_durable_before_the_upload_begins(device):
    seen = []
    device.run(upload=lambda d: seen.append(d.has_participated()))
    assert seen == [True]


def test_work_without_a_rule_needs_no_timer(device):
    result = device.run(rule=None)
    assert result.report.shape == "-v[]+^"
    assert device.steps.uploaded == ("update", None)
    assert not device.has_participated()
    with pytest.raises(ValueError, match="rule and buckets"):
        session.Work("task", 0, _RULE, None, plan=None)


def test_sessions_train_one_at_a_time_and_report_side_by_side(device):
    """Two devices in two secure sums would wait for each other, if a report kept the turn."""
    turn, log, both = session.Turn(), [], threading.Barrier(2, timeout=10)

    def meet(_):
        both.wait()

    def train(name):
        log.append(f"{name} trains")
        time.sleep(0.02)
        log.append(f"{name} has trained")

    def run(name):
        steps = _Steps(device, rule=None, check_in=meet, train=lambda _: train(name), upload=meet)
        clock, settable = device.clock, eligibility.SettableEligibility()
        return session.run(name, steps, None, settable, clock=clock, turn=turn)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        ended = list(threads.map(run, "ab"))
    assert [one.outcome for one in ended] == [session.SessionOutcome.COMPLETED] * 2
    first = log[0][0]
    second = "b" if first == "a" else "a"
    assert log == [f"{who} {what}" for who in (first, second) for what in ("trains", "has trained")]
    assert not turn.is_taken


def test_a_session_that_waits_for_its_turn_is_interrupted_when_the_runtime_ends(device):
    turn = session.Turn()
    with turn.taken(lambda: None):
        turn.is_over = True
        steps = _Steps(device)
        settable = eligibility.SettableEligibility()
        ended = session.run("p", steps, None, settable, clock=device.clock, turn=turn)
    assert ended.outcome is session.SessionOutcome.INTERRUPTED and "check_in" not in device.done


def test_who_is_not_believed_is_told_apart(device):
    result = device.run(check_in=_raise(session.AttestationFailed("replayed token")))
    assert (result.outcome, result.report.shape) == (
        session.SessionOutcome.ATTESTATION_FAILED,
        "-?",
    )
    assert result.reason == "replayed token"
    result = device.run(upload=_raise(session.AttestationFailed("?")))
    assert result.report.shape == "-v[]+*"


def test_a_known_reason_is_told_as_it_is(device):
    result = device.run(fetch=_raise(session.StepFailed("The server is gone.")))
    assert (result.outcome, result.report.shape) == (session.SessionOutcome.FAILED, "-*")
    assert result.reason == "The server is gone."


def test_a_connection_that_does_not_close_harms_nobody(device):
    result = device.run(close=_raise(ConnectionResetError()))
    assert result.outcome is session.SessionOutcome.COMPLETED


def test_what_ends_the_process_is_not_swallowed(device):
    with pytest.raises(KeyboardInterrupt):
        device.run(train=_raise(KeyboardInterrupt()))
    assert device.steps.closed == 1


def test_health_is_coarse_and_names_nobody(device):
    device.clock.now = 0.0
    report = device.run(train=lambda d: setattr(d.clock, "now", 123.4)).report
    assert report.seconds == 140.0  # 133.4, the upload included, rounded up.
    assert re.fullmatch(r"\d\d0*", str(report.peak_memory_bytes))
    assert report.peak_memory_bytes > 10_000_000
    assert set(report.versions) == {"tff_dpftrl", "python", "system", "tensorflow"}
    assert set(vars(report)) == {"shape", "seconds", "peak_memory_bytes", "versions"}


@deterministic
@hypothesis.given(st.floats(1e-6, 1e12))
def test_coarse_numbers_are_above_and_near(value):
    coarse = session._coarse(value)
    assert value * (1 - 1e-9) <= coarse <= 1.1 * value * (1 + 1e-9)
    assert coarse == float(f"{coarse:.2g}")
    assert session._coarse(0.0) == 0.0


def test_the_shapes_of_the_paper_are_among_the_few_there_are():
    assert {"-v[]+^", "-v[]+#", "-v[!", "-v[]+*", "-v[*"} <= session_shape.SHAPES
    assert len(session_shape.SHAPES) == 15


@deterministic
@hypothesis.given(st.lists(st.sampled_from(Event), max_size=8))
def test_a_shape_is_never_anything_but_the_beginning_of_one_of_them(events):
    shape = session_shape.SessionShape()
    for event in events:
        before = str(shape)
        try:
            shape.add(event)
        except ValueError as error:
            assert f"event {event.name} cannot follow {before!r}" in str(error)
            assert str(shape) == before
            assert not any(s.startswith(before + event.value) for s in session_shape.SHAPES)
            continue
        assert any(s.startswith(str(shape)) for s in session_shape.SHAPES)
