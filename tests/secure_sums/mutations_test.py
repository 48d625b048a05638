"""Whatever bytes arrive, devices and groups answer or refuse by name, and nothing else fails."""

from __future__ import annotations

import sys

import hypothesis
import numpy as np
import pytest
from google.protobuf import message as protobuf_message
from hypothesis import strategies as st

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import group, parameters, refusals, vectors

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(4, 1000))
_N = 4


def _start(model):
    demanded = parameters.Parameters(_LAYOUT, model, 2)
    session = parameters.new_session()
    vector = [np.array([1], np.uint32), np.arange(4, dtype=np.uint16)]
    devices = {i: conversations.make_participant(demanded, session, vector) for i in range(_N)}
    verify = conversations.Identity().verify
    return group.Group(demanded, session, verify_proof=verify), devices


@st.composite
def _edits(draw):
    """Changes of bytes at places from 0 to 1: overwriting, inserting and cutting out."""
    return draw(
        st.lists(
            st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=5)),
            min_size=1,
            max_size=3,
        )
    )


def _mutated(message, edits):
    content = message.SerializeToString()
    for place, cut, inserted in edits:
        at = int(place * len(content))
        content = content[:at] + inserted + content[at + cut :]
    try:
        return type(message).FromString(content)
    except protobuf_message.DecodeError:
        return None


@_SETTINGS
@hypothesis.given(st.sampled_from(parameters.ThreatModel), st.integers(1, 4), _edits())
def test_devices_answer_or_refuse(model, phase, edits):
    server, devices = _start(model)
    messages = {}
    while server.phase is not list(group.Phase)[phase]:
        if server.phase is group.Phase.REVEALING:
            return  # Nothing is confirmed in the other model.
        messages = conversations.step(server, devices, messages)
    mutated = _mutated(messages[0], edits)
    if mutated is None:
        return
    try:
        answer = devices[0].answer(mutated)
    except refusals.ProtocolRefusedError as error:
        assert str(error)
        with pytest.raises(refusals.ProtocolRefusedError):
            devices[0].answer(messages[0])
    else:
        # What could be changed unseen is what no device of this model looks at, or a share.
        assert answer.WhichOneof("message") == list(group.Phase)[phase].value


@_SETTINGS
@hypothesis.given(st.sampled_from(parameters.ThreatModel), st.integers(0, 4), _edits())
def test_groups_take_or_refuse_and_never_sum_wrongly(model, phase, edits):
    server, devices = _start(model)
    messages = {}
    mutated_phase = list(group.Phase)[phase]

    def receive(name, answer):
        if server.phase is mutated_phase and name == 0:
            answer = _mutated(answer, edits)
            if answer is None:
                server.drop(name)
                return
        try:
            server.receive(name, answer)
        except group.MessageRefusedError as error:
            assert name == 0 and str(error)
            server.drop(name)

    try:
        while server.phase is not group.Phase.DONE:
            messages = conversations.step(server, devices, messages, between=receive)
    except (group.GroupLostError, refusals.ProtocolRefusedError):
        # A bad share, or keys that one device replaced by others, can cost the group its sum:
        # three of four devices are left, and an active server's threshold is three.
        return
    count, entries = server.total()
    if mutated_phase is not group.Phase.MASKING:  # Within the modulus a device can lie.
        assert int(count[0]) == len(server.survivors)
        expected = [i * len(server.survivors) % 1000 for i in range(4)]
        np.testing.assert_array_equal(entries, expected)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
