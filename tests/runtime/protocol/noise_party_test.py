"""Tests of tff_dpftrl.runtime.protocol.noise_party."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.protocol import noise_party, wire_pb2

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
_NONCE = b"n" * 32


def test_an_announcement_is_verified_for_each_name_of_the_server():
    made = noise_party.announcement(_KEY, _NONCE, "next word", 7)
    assert (made.task, made.next_round) == ("next word", 7)
    assert noise_party.is_signed(made, [b"o" * 32, _NONCE])
    assert not noise_party.is_signed(made, [b"o" * 32])
    assert not noise_party.is_signed(made, [])


@pytest.mark.parametrize(
    "change", [{"task": "other"}, {"next_round": 8}, {"key": b"short"}, {"key": bytes(32)}]
)
def test_a_changed_announcement_is_not_signed(change):
    made = noise_party.announcement(_KEY, _NONCE, "next word", 7)
    made.MergeFrom(wire_pb2.NoiseParty(**change))
    assert not noise_party.is_signed(made, [_NONCE])
