"""Whatever bytes arrive, devices and groups answer or refuse by name, and nothing else fails."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message as protobuf_message
from hypothesis import strategies as st

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import group, noise_party, parameters, refusals, vectors

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(4, 1000))
_N = 4
_SIGNING_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def _start(model, noise_parties=()):
    demanded = parameters.Parameters(_LAYOUT, model, 2, noise_parties=noise_parties)
    session = bytes(32)
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


def _start_with_noise(model):
    server, devices = _start(model, (_SIGNING_KEY.public_key().public_bytes_raw(),))
    drawn = []

    def draw_noise():
        drawn.append(1)
        return [np.array([0], np.uint32), np.full(4, 7, np.uint16)]

    # The group has the parameters and the session of all.
    devices["party"] = noise_party.NoiseParty(server._demanded, bytes(32), _SIGNING_KEY, draw_noise)
    return server, devices, drawn


_PARTS = ("noise_party_keys", "noise_request", "masked_vector")


@hypothesis.settings(_SETTINGS, max_examples=30)
@hypothesis.given(st.sampled_from(parameters.ThreatModel), st.sampled_from(_PARTS), _edits())
def test_noise_parties_and_their_groups_answer_or_refuse(model, part, edits):
    server, devices, drawn = _start_with_noise(model)

    def changed(message):
        return part == message.WhichOneof("message") and _mutated(message, edits) or message

    def receive(name, answer):
        try:
            server.receive(name, changed(answer) if name == "party" else answer)
        except group.MessageRefusedError as error:
            assert name == "party" and str(error)
            server.drop(name)

    messages = {}
    try:
        while server.phase is not group.Phase.DONE:
            messages = conversations.step(server, devices, messages, between=receive)
            messages = {name: changed(message) for name, message in messages.items()}
    except refusals.ProtocolRefusedError as error:
        assert part == "noise_request" and str(error) and not drawn
    except group.GroupLostError:
        assert drawn == ([1] if part == "masked_vector" else [])
    else:
        assert drawn == [1]
