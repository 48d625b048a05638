"""Announcement of a noise party in its check-in, and its verification by the server."""

from __future__ import annotations

from collections.abc import Iterable

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.protocol import wire_pb2

_DOMAIN = b"tff_dpftrl noise party checks in 1:"


def announcement(
    key: ed25519.Ed25519PrivateKey, nonce: bytes, task: str, next_round: int
) -> wire_pb2.NoiseParty:
    """Makes the signed announcement of a noise party, for `CheckIn.noise_party`.

    The plan of the task names the public key. The nonce is that of the check-in
    (`session_stream.attested_nonce`). The party has not given the noise of `next_round`, nor of a
    later one.
    """
    made = wire_pb2.NoiseParty(
        key=key.public_key().public_bytes_raw(), task=task, next_round=next_round
    )
    made.signature = key.sign(_signed(made, nonce))
    return made


def is_signed(announced: wire_pb2.NoiseParty, nonces: Iterable[bytes]) -> bool:
    """Checks that the owner of the announced key has signed an untrusted announcement.

    Whether the plan of the task names the key is for the caller to check. There is a nonce of the
    check-in for each name by which the party may know the server.
    """
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(announced.key)
    except ValueError:
        return False
    for nonce in nonces:
        try:
            key.verify(announced.signature, _signed(announced, nonce))
        except exceptions.InvalidSignature:
            continue
        return True
    return False


def _signed(announced: wire_pb2.NoiseParty, nonce: bytes) -> bytes:
    number = announced.next_round.to_bytes(8, "big")
    return b"".join([_DOMAIN, nonce, announced.key, number, announced.task.encode()])
