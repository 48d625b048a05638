"""Tests of tff_dpftrl.runtime.device.device_runtime."""

from __future__ import annotations

import sys
import types

import pytest

from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    participation_timer,
    session,
)

_RULE = participation_timer.ParticipationRule(min_sep=4, max_participations=9)
_BUCKETS = histograms.ParticipationBuckets((1, 2), (1, 9))


class _Connection:
    def __init__(self):
        self.summaries = []

    def send_summary(self, population, report, address):
        assert address == "of the session"
        self.summaries.append((population, report))


class _Steps(session.SessionSteps):
    """A session of round 5 of a task."""

    work = None
    address = "of the session"

    def check_in(self, keep_going):
        return None

    def fetch(self, keep_going):
        self.work = session.Work("t", 5, _RULE, _BUCKETS, plan=None)
        return self.work

    def train(self, work, keep_going):
        return b""

    def upload(self, update, participation, keep_going):
        return session.UploadAnswer(True, (7.0,))

    def close(self):
        pass


@pytest.fixture(name="own")
def _own(monkeypatch):
    monkeypatch.setattr(device_runtime.DeviceRuntime, "steps", lambda self, population: _Steps())
    return device_runtime.DeviceRuntime(
        _Connection(),
        plans=None,
        examples=None,
        timer=participation_timer.MemoryTimer(lambda: 0.0),
        attester=attester.NoAttester(),
        eligibility=eligibility.SettableEligibility(),
    )


def test_what_a_task_asks_is_known_from_the_session_before(own):
    own.check_rest("p", "t", 5)  # Nothing is known yet.
    ended = own.run_session("p")
    assert (ended.result.turns, ended.work.round_index) == ((7.0,), 5)
    with pytest.raises(participation_timer.TimerRefusal):
        own.check_rest("p", "t", 8)
    own.check_rest("p", "t", 9)
    own.check_rest("p", "another task", 8)
    own.check_rest("another population", "t", 8)


@pytest.mark.parametrize("known", [{}, {"__version__": "2.14.0"}])
def test_a_session_may_end_while_tensorflow_is_being_imported(own, monkeypatch, known):
    module = types.ModuleType("tensorflow")
    vars(module).update(known)
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    own.run_session("p")
    [(population, report)] = own.connection.summaries
    assert (population, report.shape) == ("p", "-v[]+^")
    assert report.versions.get("tensorflow") == known.get("__version__")
