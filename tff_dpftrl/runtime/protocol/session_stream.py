"""Constants and derivations that both ends of a session's stream share, besides the messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from tff_dpftrl.runtime.protocol import attestation, wire_pb2
from tff_dpftrl.runtime.store import contents
from tff_dpftrl.secure_sums import secure_sum_pb2

VERSIONS = (1,)
"""Versions of the protocol that this package speaks."""

_DEVICES = wire_pb2.DESCRIPTOR.services_by_name["Devices"]
SERVICE = _DEVICES.full_name
SESSION_METHOD, TELL_METHOD = (f"/{SERVICE}/{method.name}" for method in _DEVICES.methods)
"""Paths of the two methods, for handlers and stubs that are not generated."""

POPULATION_KEY = "population-bin"
"""Key of a session's metadata whose value is the population's name in UTF-8. A server of several
populations has to know it before the check-in: the challenge names the round, and the quota of the
population counts the session."""

KEEPALIVE_S = 60.0
"""Interval in seconds at which a waiting device pings the server. A server must allow half of it
(`grpc.http2.min_recv_ping_interval_without_data_ms`), or it ends streams with "too many pings"."""


PART_BYTES = 1 << 20
"""Largest size of an update, or of its part, in one message, in bytes."""

FIRST_PART_BYTES = 1 << 10
"""Largest size of the first part of an update in parts, in bytes. A server must hold it before it
has room for the rest."""


def report_messages(
    report: wire_pb2.Report, update: Iterable[bytes | memoryview] | None = None
) -> Iterator[wire_pb2.FromDevice]:
    """Splits a report into messages: one, unless its update is too large.

    Args:
      report: The report; an update in it is removed if it is large.
      update: Serialised update in pieces, which are copied as the messages are taken; None for the
        one in `report`.

    Yields:
      The messages, in order.
    """
    update = [report.update] if update is None else list(update)
    if sum(map(len, update)) > PART_BYTES:
        report.ClearField("update")
        yield from _parts(update)
    else:
        report.update = b"".join(update)
    yield wire_pb2.FromDevice(report=report)


def secure_sum_messages(message: secure_sum_pb2.ToServer) -> Iterator[wire_pb2.FromDevice]:
    """Splits a message of a secure sum: into one message, unless its masked vector is too large.

    Args:
      message: The message; a large vector is removed from it.

    Yields:
      The messages, in order.
    """
    if len(message.masked_vector.content) > PART_BYTES:
        vector = message.masked_vector.content
        message.masked_vector.ClearField("content")
        yield from _parts([vector])
    yield wire_pb2.FromDevice(secure_sum=message.SerializeToString())


def _parts(content: Iterable[bytes | memoryview]) -> Iterator[wire_pb2.FromDevice]:
    for part in contents.in_pieces(content, FIRST_PART_BYTES, PART_BYTES):
        yield wire_pb2.FromDevice(update_part=part)


def attested_nonce(challenge: bytes, server_name: str, population: str) -> bytes:
    """Derives the nonce for the token of a check-in.

    Args:
      challenge: Challenge that the server sent.
      server_name: Host name that the server's certificate proves. The device takes it from the
        address that it connects to, without the port.
      population: Name of the population that the device checks in for.

    Returns:
      The nonce, `attestation.NONCE_BYTES` bytes.
    """
    return attestation.bound_nonce(challenge, server_name, population)


def identity_nonce(session: bytes, population: str, identity_key: bytes) -> bytes:
    """Derives the nonce for the token that vouches for a device's identity key in a secure sum.

    Args:
      session: Session of the secure sum.
      population: Name of the population.
      identity_key: Raw public key of the device, made for this session only.

    Returns:
      The nonce, `attestation.NONCE_BYTES` bytes.
    """
    return attestation.bound_nonce(session, "secure sum", population, identity_key.hex())


def secure_sum_context(task: str, round_index: int, model: bytes) -> bytes:
    """Computes the context of a secure sum: a digest of what all its devices must have received.

    By sending each device a different model, a server could make all updates but one zero (Pasquini
    et al. 2022). Devices with different contexts have no masks in common.

    Args:
      task: Name of the task.
      round_index: Index of the round, from 0.
      model: Serialised model that the device begins with.

    Returns:
      The context of `secure_sums`, 32 bytes.
    """
    digest = hashlib.sha256()
    for part in (task.encode(), str(round_index).encode(), model):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
