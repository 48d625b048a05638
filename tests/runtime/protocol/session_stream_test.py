"""Tests of tff_dpftrl.runtime.protocol.session_stream."""

from __future__ import annotations

import sys

import pytest

from tff_dpftrl.runtime.protocol import attestation, session_stream


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
