"""Tests of tff_dpftrl.runtime.device.round_pace, and of what a device does with it."""

from __future__ import annotations

import dataclasses
import random
import sys
import types

import pytest

from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import (
    attester,
    device,
    eligibility,
    participation_timer,
    round_pace,
    session,
)

_RULE = participation_timer.ParticipationRule(min_sep=4, max_participations=9)
_BUCKETS = histograms.ParticipationBuckets((1, 2), (1, 9))


def test_a_round_takes_as_long_as_the_last_ones_seen():
    pace = round_pace.RoundPace()
    pace.see("p", "t", 10, 1_000.0)
    assert pace.rest_s("p", "t", _RULE, session_s=7.0) == pytest.approx(1.1 * 4 * 2 * 7.0)
    pace.see("p", "t", 15, 1_100.0)
    assert pace.rest_s("p", "t", _RULE, session_s=7.0) == pytest.approx(1.1 * 4 * 20.0)
    pace.see("p", "t", 15, 1_110.0)  # Another attempt at the same round tells nothing.
    assert pace.rest_s("p", "t", _RULE, session_s=7.0) == pytest.approx(1.1 * 4 * 20.0)
    pace.see("p", "t", 17, 1_104.0)
    assert pace.rest_s("p", "t", _RULE, session_s=7.0) == pytest.approx(1.1 * 4 * 2.0)
    pace.see("p", "t", 0, 2_000.0)  # The task began anew.
    assert pace.rest_s("p", "t", _RULE, session_s=7.0) == pytest.approx(1.1 * 4 * 2 * 7.0)


def test_hours_count_too():
    pace = round_pace.RoundPace()
    pace.see("p", "t", 1, 0.0)
    rule = dataclasses.replace(_RULE, min_hours=2.0)
    assert pace.rest_s("p", "t", rule, session_s=7.0) == 7_200.0


def test_there_is_no_rest_from_another_task():
    pace = round_pace.RoundPace()
    pace.see("p", "t", 1, 0.0)
    pace.see("p", "evaluation", 1, 10.0)
    pace.see("q", "t", 1, 20.0)
    assert pace.rest_s("p", "t", _RULE, session_s=7.0) == 0.0
    assert pace.rest_s("q", "t", _RULE, session_s=7.0) > 0


class _Connection:
    def tell(self, population, report):
        return None


class _Steps(session.SessionSteps):
    """A session of ten seconds that is asked for a round and answered with turns."""

    def __init__(self, clock, answer):
        self._clock, self._answer = clock, answer
        self.work = None

    def check_in(self, keep_going):
        return None

    def fetch(self, keep_going):
        self.work = session.Work("t", 5, _RULE, _BUCKETS, plan=None)
        return self.work

    def train(self, work, keep_going):
        self._clock[0] += 10.0
        return b""

    def upload(self, update, participation, keep_going):
        return self._answer

    def close(self):
        pass


@pytest.fixture(name="turns_of")
def _turns_of(monkeypatch):
    """Runs a session of a device that is answered with turns; returns those that are left."""
    now = [0.0]
    own = device.Device(
        _Connection(),
        plans=None,
        examples=None,
        timer=participation_timer.MemoryTimer(lambda: now[0]),
        attester=attester.NoAttester(),
        eligibility=eligibility.SettableEligibility(),
        steady_clock=lambda: now[0],
        generator=random.Random(0),
    )

    def turns_of(*turns, is_accepted=True):
        monkeypatch.setattr(own.timer, "_last", {})
        answer = session.UploadAnswer(is_accepted, turns)
        monkeypatch.setattr(device.Device, "steps", lambda self, name: _Steps(now, answer))
        return own.run_session("p").result.turns

    return turns_of


@pytest.mark.parametrize("is_accepted", [True, False])
def test_turns_at_which_a_device_could_only_rest_are_let_go(turns_of, is_accepted):
    # The session took 10 seconds, and four rounds of twice that length, and a tenth, are 88.
    assert turns_of(5.0, 87.0, 89.0, 180.0, is_accepted=is_accepted) == (89.0, 180.0)
    [turn] = turns_of(5.0, 87.0, is_accepted=is_accepted)
    assert 88.0 <= turn <= 132.0
    assert turns_of(is_accepted=is_accepted) == ()


def test_a_session_may_end_while_tensorflow_is_being_imported(turns_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    assert turns_of(1e6) == (1e6,)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
