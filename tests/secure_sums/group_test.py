"""Sums of groups are exact for any drop-outs, or the group is lost and nothing revealed."""

from __future__ import annotations

import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import group, parameters, vectors

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
_MODULI = st.one_of(
    st.integers(2, 300),
    st.integers(2**16 - 5, 2**16 + 5),
    st.integers(2**31, 2**32),
    st.integers(0, 63).map(lambda log: 2 ** (log + 1)),
)
_LAYOUTS = st.lists(st.builds(vectors.Segment, st.integers(1, 9), _MODULI), min_size=1, max_size=4)


def _devices(demanded, session, num_devices, seed=0):
    rng = np.random.default_rng(seed)
    inputs = {
        name: conversations.random_vector(demanded.layout, rng)
        for name in map("device {}".format, range(num_devices))
    }
    devices = {
        name: conversations.make_participant(demanded, session, vector)
        for name, vector in inputs.items()
    }
    return inputs, devices


@_SETTINGS
@hypothesis.given(st.data())
def test_sum_is_that_of_the_survivors_or_there_is_none(data):
    model = data.draw(st.sampled_from(parameters.ThreatModel))
    num_devices = data.draw(st.integers(2, 9))
    demanded = parameters.Parameters(
        tuple(data.draw(_LAYOUTS)), model, data.draw(st.integers(2, num_devices))
    )
    names = st.sampled_from([f"device {i}" for i in range(num_devices)])
    drop_outs = data.draw(
        st.dictionaries(
            st.sampled_from(list(group.Phase)[:5]), st.sets(names, max_size=2), max_size=3
        )
    )
    session = parameters.new_session()
    inputs, devices = _devices(demanded, session, num_devices)
    fraction = data.draw(st.sampled_from([None, 0.1, 0.7, 0.95]))
    server = group.Group(demanded, session, threshold_fraction=fraction)
    try:
        conversations.run(server, devices, drop_outs=drop_outs)
    except group.GroupLostError:
        assert server.phase is group.Phase.LOST
        assert sum(map(len, drop_outs.values())) > 0
        with pytest.raises(ValueError, match="no sum"):
            server.total()
        return
    gone = set().union(*(drop_outs.get(phase, set()) for phase in list(group.Phase)[:3]))
    assert set(server.survivors) == inputs.keys() - gone
    expected = conversations.plain_sum(demanded.layout, [inputs[name] for name in server.survivors])
    for total, entries in zip(server.total(), expected, strict=True):
        np.testing.assert_array_equal(total, entries)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
