"""Tests of tff_dpftrl.runtime.protocol.session_stream."""

from __future__ import annotations

import math

import pytest

from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.secure_sums import secure_sum_pb2


def test_the_methods_are_those_of_the_proto_file():
    assert session_stream.SESSION_METHOD == "/tff_dpftrl.runtime.protocol.Devices/Session"
    assert session_stream.TELL_METHOD == "/tff_dpftrl.runtime.protocol.Devices/Tell"


def test_a_token_is_for_one_server_and_one_population():
    nonces = {
        session_stream.attested_nonce(challenge, server, population)
        for challenge in (b"a", b"b")
        for server in ("one.example", "other.example")
        for population in ("p", "q")
    }
    assert len(nonces) == 8
    assert {len(nonce) for nonce in nonces} == {attestation.NONCE_BYTES}


@pytest.mark.parametrize("parts", [0.5, 1, 1.5, 3])
def test_an_update_is_sent_in_parts_if_it_is_large(parts):
    update = bytes(range(256)) * int(parts * session_stream.PART_BYTES / 256)
    report = wire_pb2.Report(attempt="a", update=update, strides=[0, 1])
    *sent, last = session_stream.report_messages(report)
    assert len(sent) == (0 if parts <= 1 else 1 + math.ceil(parts))
    assert all(0 < len(message.update_part) <= session_stream.PART_BYTES for message in sent)
    assert all(len(first.update_part) == session_stream.FIRST_PART_BYTES for first in sent[:1])
    assert b"".join(message.update_part for message in sent) + last.report.update == update
    assert (last.report.attempt, list(last.report.strides)) == ("a", [0, 1])


@pytest.mark.parametrize("parts", [0.5, 1, 1.5])
def test_a_masked_vector_is_sent_in_parts_if_it_is_large(parts):
    vector = bytes(range(256)) * int(parts * session_stream.PART_BYTES / 256)
    masked = secure_sum_pb2.ToServer(masked_vector={"content": vector})
    *sent, last = session_stream.secure_sum_messages(masked)
    assert len(sent) == (0 if parts <= 1 else 1 + math.ceil(parts))
    message = secure_sum_pb2.ToServer.FromString(last.secure_sum)
    assert message.WhichOneof("message") == "masked_vector"
    content = message.masked_vector.content
    assert b"".join(part.update_part for part in sent) + content == vector


def test_other_messages_of_a_secure_sum_stay_what_they_are():
    shares = secure_sum_pb2.ToServer(shares={"self_mask_commitment": b"c"})
    (sent,) = session_stream.secure_sum_messages(shares)
    assert secure_sum_pb2.ToServer.FromString(sent.secure_sum) == shares


def test_an_identity_is_of_one_session_population_and_key():
    arguments = [(b"s", "p", b"k"), (b"t", "p", b"k"), (b"s", "q", b"k"), (b"s", "p", b"l")]
    assert len({session_stream.identity_nonce(*each) for each in arguments}) == 4


def test_the_context_of_a_secure_sum_is_all_that_devices_are_told():
    arguments = [
        ("nwp", 3, b"model"),
        ("nwp", 3, b"other"),
        ("nwp", 4, b"model"),
        ("nwp2", 3, b"model"),
    ]
    contexts = {session_stream.secure_sum_context(*each) for each in [*arguments, *arguments]}
    assert len(contexts) == len(arguments) and {len(context) for context in contexts} == {32}
