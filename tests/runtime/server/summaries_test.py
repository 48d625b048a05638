"""Tests of tff_dpftrl.runtime.server.summaries."""

from __future__ import annotations

import pytest

from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import errors, summaries


def _summary(shape):
    return wire_pb2.SessionSummary(shape=shape)


def _taken(share, tries=100):
    return sum(share.take() for _ in range(tries))


def test_each_session_leaves_room_for_one_summary():
    share = summaries.Share(10.0, lambda: 0.0)
    assert not share.take()
    for _ in range(3):
        share.add()
    assert _taken(share) == 3


def test_room_that_is_not_taken_is_forgotten():
    now = [0.0]
    share = summaries.Share(10.0, lambda: now[0])
    share.add()
    now[0] = 9.0
    share.add()
    now[0] = 18.0  # Kept for its ten seconds; the first one may be kept as well.
    assert share.take()
    now[0] = 19.0
    share.add()
    now[0] = 40.0
    assert not share.take()
    for _ in range(1000):  # Of sessions that never tell, two periods are kept.
        now[0] += 1.0
        share.add()
    assert _taken(share) <= 20


def test_sessions_with_a_plan_are_counted_apart():
    shares = summaries.Shares(10.0, lambda: 0.0)
    for _ in range(2):
        shares.session_opened()
    shares.session_configured()
    shares.check(_summary("-v[]+^"))
    with pytest.raises(errors.Refused):
        shares.check(_summary("-v[]+^"))
    shares.check(_summary("-#"))
    shares.check(_summary(summaries.OTHER))
    with pytest.raises(errors.Refused):
        shares.check(_summary("-?"))
