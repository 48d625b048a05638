"""Parameters that devices can demand, and thresholds by the model of the server."""

from __future__ import annotations

import pytest

from tff_dpftrl.secure_sums import parameters, vectors

_LAYOUT = (vectors.Segment(1, 2),)
_HONEST = parameters.ThreatModel.HONEST_BUT_CURIOUS
_ACTIVE = parameters.ThreatModel.ACTIVE_SERVER


def test_least_thresholds_exceed_a_half_and_two_thirds():
    for number in range(2, 500):
        honest, active = (model.least_threshold(number) for model in (_HONEST, _ACTIVE))
        assert 2 * honest > number >= 2 * (honest - 1)
        assert 3 * active > 2 * number >= 3 * (active - 1)
        assert active <= number


@pytest.mark.parametrize(
    "args, match",
    [
        (((), _HONEST, 2), "layout is empty"),
        ((_LAYOUT, _HONEST, 1), "least_devices must be at least 2, got 1. The sum of one"),
        ((_LAYOUT, _HONEST, 2.5), "least_devices must be an integer"),
        ((_LAYOUT, _HONEST, 2, 0), "least_neighbours must be at least 1"),
        ((_LAYOUT, _ACTIVE, 2, 5), "least_neighbours must be None, got 5"),
        ((_LAYOUT, _ACTIVE, 3, None, 2), "most_devices must be at least 3, got 2"),
        ((_LAYOUT, _HONEST, 3, 5, 5), "least_neighbours must be below most_devices=5, got 5"),
        (((("a", 4),), _HONEST, 2), r"layout must be of Segments, got \('a', 4\)"),
        ((_LAYOUT, "active-server", 2), "threat_model must .*, got 'active-server': use Threat"),
    ],
)
def test_parameters_that_make_no_sense(args, match):
    with pytest.raises(ValueError, match=match):
        parameters.Parameters(*args)


def test_sessions_are_new():
    sessions = {parameters.new_session() for _ in range(100)}
    assert len(sessions) == 100
    assert all(parameters.check_session(session) == session for session in sessions)


@pytest.mark.parametrize("session", ["x" * 32, 7, bytes(31)], ids=["text", "number", "short"])
def test_no_name_of_a_session(session):
    with pytest.raises(ValueError, match="session must .* Use new_session"):
        parameters.check_session(session)
