"""Who can go on when devices are gone, against enumeration."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import scipy.sparse.csgraph
from hypothesis import strategies as st

from tff_dpftrl.secure_sums import parameters, shareholders

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
_HONEST = parameters.ThreatModel.HONEST_BUT_CURIOUS


def test_thresholds_are_above_their_fraction_as_it_is_written():
    def threshold(num_members, fraction):
        return shareholders.threshold(num_members, _HONEST, fraction)

    for percent in range(50, 100):
        assert threshold(100, percent / 100) == percent + 1
    assert threshold(100, 0.0) == 51
    assert threshold(7, 0.99) == 7
    assert threshold(10, 1 - 1e-12) == 10


def _draw(data, num_devices):
    degree = data.draw(st.sampled_from([2, 3, 4, None]))
    return shareholders.Shareholders(num_devices, degree, _HONEST, 0.0)


@_SETTINGS
@hypothesis.given(st.data())
def test_enough_is_the_largest_set_that_can_go_on(data):
    holders = _draw(data, 9)
    present = data.draw(st.sets(st.integers(0, 8)))
    able = [
        set(chosen)
        for size in range(10)
        for chosen in itertools.combinations(sorted(present), size)
        if all(holders.recoverable(index, set(chosen)) for index in chosen)
    ]
    assert holders.with_enough(present) == set().union(*able)
    assert holders.with_enough(present) in able


@_SETTINGS
@hypothesis.given(st.data())
def test_connected_as_a_library_says(data):
    holders = _draw(data, 14)
    present = data.draw(st.sets(st.integers(0, 13), min_size=1))
    graph = np.array([[j in holders.members[i] for j in present] for i in present])
    num_parts, _ = scipy.sparse.csgraph.connected_components(graph)
    assert holders.is_connected(present) == (num_parts == 1)


def test_members_include_the_device_and_are_mutual():
    for degree, expected in ((4, 5), (5, 7), (None, 11), (30, 11)):
        holders = shareholders.Shareholders(11, degree, _HONEST, 0.0)
        for index, members in enumerate(holders.members):
            assert index in members
            assert len(members) == expected
            assert holders.points[index] == dict(
                zip(sorted(members), range(1, expected + 1), strict=True)
            )
            assert all(index in holders.members[other] for other in members)
        assert holders.thresholds == [expected // 2 + 1] * 11


def test_whose_keys_nobody_needs():
    holders = shareholders.Shareholders(8, 2, _HONEST, 0.0)
    a = 0
    others = sorted(set(range(8)) - holders.members[a])
    assert holders.with_present_neighbours([a], set(others)) == []
    assert holders.with_present_neighbours(range(8), {a}) == sorted(holders.members[a])
