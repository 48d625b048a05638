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
    """Makes the signed announcement of a noise party.

    Args:
      key: Private key of the party, whose public key the plan of the task names.
      nonce: Nonce of the check-in, from `session_stream.attested_nonce`.
      task: Name of the task.
      next_round: Index of the first round whose noise the party has not given.

    Returns:
      The message for `CheckIn.noise_party`.
    """
    made = wire_pb2.NoiseParty(
        key=key.public_key().public_bytes_raw(), task=task, next_round=next_round
    )
    made.signature = key.sign(_signed(made, nonce))
    return made


def is_signed(announced: wire_pb2.NoiseParty, nonces: Iterable[bytes]) -> bool:
    """Checks that the owner of the announced key has signed an announcement.

    Whether the plan of the task names the key is for the caller to check.

    Args:
      announced: Announcement in a check-in. Untrusted.
      nonces: Nonces of the check-in: one for each name by which the party may know the server.

    Returns:
      Whether the signature is valid for one of the nonces.
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
