"""Constants and derivations that both ends of a session's stream share, besides the messages."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator

from tff_dpftrl import validation
from tff_dpftrl.runtime.protocol import attestation, wire_pb2
from tff_dpftrl.runtime.store import contents
from tff_dpftrl.secure_sums import secure_sum_pb2

VERSIONS = (1, 2)
"""Versions of the protocol that this package speaks."""

_SENDS_LESS_SINCE = 2

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


def sends_less(version: int) -> bool:
    """Returns whether a version of the protocol has what saves bytes.

    It names a plan by its hash, and deflates the plan if the device wants it; updates are rounded
    where their plan says so; masked vectors are packed bit by bit.
    """
    return version >= _SENDS_LESS_SINCE


def report_messages(
    report: wire_pb2.Report, update: Iterable[bytes | memoryview] | None = None
) -> Iterator[wire_pb2.FromDevice]:
    """Splits a report into messages: one, unless its update is too large.

    A large update is removed from the report. A serialised update may come in pieces, which are
    copied as the messages are taken; None for the one in `report`.
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

    A large vector is removed from the message.
    """
    if len(message.masked_vector.content) > PART_BYTES:
        vector = message.masked_vector.content
        message.masked_vector.ClearField("content")
        yield from _parts([vector])
    yield wire_pb2.FromDevice(secure_sum=message.SerializeToString())


def _parts(content: Iterable[bytes | memoryview]) -> Iterator[wire_pb2.FromDevice]:
    for part in contents.in_pieces(content, FIRST_PART_BYTES, PART_BYTES):
        yield wire_pb2.FromDevice(update_part=part)


def deflated_plan(plan: bytes) -> bytes:
    """Deflates a serialised plan for the wire.

    gRPC's own compression would deflate it again for each device, and models and updates, which
    hardly get smaller, as well.
    """
    return zlib.compress(plan, 9)


def inflated_plan(content: bytes, most_bytes: int) -> bytes:
    """Inflates the untrusted result of `deflated_plan`.

    It raises ValueError if it is none, has more than `most_bytes` bytes, or something follows it.
    """
    inflater = zlib.decompressobj()
    try:
        plan = inflater.decompress(content, most_bytes)
    except zlib.error:
        raise validation.UsageError("The plan cannot be inflated.") from None
    if inflater.unconsumed_tail:
        raise validation.UsageError(f"The plan has more than {most_bytes} bytes.")
    if not inflater.eof or inflater.unused_data:
        raise validation.UsageError("The plan cannot be inflated: it ends too early, or too late.")
    return plan


def attested_nonce(challenge: bytes, server_name: str, population: str) -> bytes:
    """Derives the nonce, `attestation.NONCE_BYTES` bytes, for the token of a check-in.

    `server_name` is the host name that the server's certificate proves. The device takes it from
    the address that it connects to, without the port.
    """
    return attestation.bound_nonce(challenge, server_name, population)


def identity_nonce(session: bytes, population: str, identity_key: bytes) -> bytes:
    """Derives the nonce for the token that vouches for a device's identity key in a secure sum.

    The raw public key was made for this session only.
    """
    return attestation.bound_nonce(session, "secure sum", population, identity_key.hex())


def secure_sum_context(task: str, round_index: int, model: bytes) -> bytes:
    """Computes the context of a secure sum: a digest of what all its devices must have received.

    By sending each device a different model, a server could make all updates but one zero (Pasquini
    et al. 2022). Devices with different contexts have no masks in common. The digest has 32 bytes.
    """
    digest = hashlib.sha256()
    for part in (task.encode(), str(round_index).encode(), model):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
