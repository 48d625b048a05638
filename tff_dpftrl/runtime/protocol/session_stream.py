"""What both ends of a session's stream have to agree upon, besides its messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from tff_dpftrl.runtime.protocol import attestation, wire_pb2
from tff_dpftrl.secure_sums import secure_sum_pb2

VERSIONS = (1,)
"""Of the protocol, that this package speaks."""

_DEVICES = wire_pb2.DESCRIPTOR.services_by_name["Devices"]
SERVICE = _DEVICES.full_name
SESSION_METHOD, TELL_METHOD = (f"/{SERVICE}/{method.name}" for method in _DEVICES.methods)
"""Paths of the two methods, for handlers and stubs that are not generated."""

KEEPALIVE_S = 60.0
"""A device asks so often whether the server is still there while it waits; a server must
allow half of that (`grpc.http2.min_recv_ping_interval_without_data_ms`), or it ends streams
with "too many pings"."""


PART_BYTES = 1 << 20
"""Of an update in one message, at most."""

FIRST_PART_BYTES = 1 << 10
"""Of the first part of an update in parts, at most: what a server has to hold before it has
room for the rest."""


def report_messages(report: wire_pb2.Report) -> Iterator[wire_pb2.FromDevice]:
    """A report as messages: one, unless its update is larger than one may be.

    Args:
      report: The report; its update is taken out of it if it is sent in parts.

    Yields:
      The messages, in order.
    """
    if len(report.update) > PART_BYTES:
        update = report.update
        report.ClearField("update")
        yield from _parts(update)
    yield wire_pb2.FromDevice(report=report)


def secure_sum_messages(message: secure_sum_pb2.ToServer) -> Iterator[wire_pb2.FromDevice]:
    """A message of a secure sum as messages: one, unless its masked vector is larger.

    Args:
      message: The message; its vector is taken out of it if it is sent in parts.

    Yields:
      The messages, in order.
    """
    if len(message.masked_vector.content) > PART_BYTES:
        vector = message.masked_vector.content
        message.masked_vector.ClearField("content")
        yield from _parts(vector)
    yield wire_pb2.FromDevice(secure_sum=message.SerializeToString())


def _parts(content: bytes) -> Iterator[wire_pb2.FromDevice]:
    view = memoryview(content)
    yield wire_pb2.FromDevice(update_part=bytes(view[:FIRST_PART_BYTES]))
    for begin in range(FIRST_PART_BYTES, len(view), PART_BYTES):
        yield wire_pb2.FromDevice(update_part=bytes(view[begin : begin + PART_BYTES]))


def attested_nonce(challenge: bytes, server_name: str, population: str) -> bytes:
    """What the token of a check-in is bound to.

    Args:
      challenge: What the server sent.
      server_name: The host that the server's certificate proves, which each side knows by
        itself: the device from the address that it was given, without the port.
      population: What the device checks in for.

    Returns:
      The nonce, `attestation.NONCE_BYTES` bytes.
    """
    return attestation.bound_nonce(challenge, server_name, population)


def identity_nonce(session: bytes, population: str, identity_key: bytes) -> bytes:
    """What a device's token is bound to by which others know its key in a secure sum.

    Args:
      session: The session of the sum.
      population: What the device takes part in.
      identity_key: Its raw public key, of this session alone.

    Returns:
      The nonce, `attestation.NONCE_BYTES` bytes.
    """
    return attestation.bound_nonce(session, "secure sum", population, identity_key.hex())


def secure_sum_context(task: str, round_index: int, model: bytes) -> bytes:
    """What the devices of a secure sum must have been told alike, and the server keeps to.

    With a model of its own for each device, a server could have all updates but one be zero
    (Pasquini et al. 2022): devices that were told different things have no mask in common.

    Args:
      task: Name of the task.
      round_index: The round, from 0.
      model: What the device begins with, serialised.

    Returns:
      The context of `secure_sums`, 32 bytes.
    """
    digest = hashlib.sha256()
    for part in (task.encode(), str(round_index).encode(), model):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
