"""Runs whole groups: devices and server, with drop-outs, for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from tff_dpftrl.secure_sums import device, group, parameters, secure_sum_pb2, vectors

HONEST = parameters.ThreatModel.HONEST_BUT_CURIOUS
ACTIVE = parameters.ThreatModel.ACTIVE_SERVER


class Identity(device.Identity):
    """Proofs that anybody can check, and nobody would trust outside a test."""

    def make_proof(self, identity_public_key: bytes) -> bytes:
        return b"genuine " + identity_public_key

    def verify(self, identity_public_key: bytes, proof: bytes) -> bool:
        return proof == self.make_proof(identity_public_key)


def make_participant(demanded, session, vector, context=b"") -> device.Participant:
    """A device; in the active model with an identity."""
    identity = Identity() if demanded.threat_model is ACTIVE else None
    return device.Participant(demanded, session, vector, identity=identity, context=context)


def bound(session: bytes) -> bytes:
    """What keys and signatures are bound to where devices are told nothing else."""
    return parameters.bound_session(session, b"")


def random_vector(layout, rng: np.random.Generator) -> vectors.Vector:
    """Uniform entries."""
    return [
        rng.integers(0, segment.modulus - 1, segment.size, segment.dtype.newbyteorder("="), True)
        for segment in layout
    ]


def plain_sum(layout, summands) -> vectors.Vector:
    """The sum that the group should come to, with Python's integers."""
    return [
        np.array(
            [sum(map(int, column)) % segment.modulus for column in zip(*entries, strict=True)],
            segment.dtype,
        )
        for segment, entries in zip(layout, zip(*summands, strict=True), strict=True)
    ]


def step(
    server: group.Group,
    devices: dict,
    messages: dict,
    *,
    gone: Collection = (),
    between: Callable[[object, secure_sum_pb2.ToServer], None] | None = None,
) -> dict:
    """One round trip: devices answer, the group takes their answers and goes on.

    Args:
      server: The group.
      devices: Participants by name.
      messages: What the group sent them; empty at first.
      gone: Whose answers never arrive.
      between: Called with each name and answer, instead of handing it to the group.

    Returns:
      What the group sends next.
    """
    if server.phase is group.Phase.ADVERTISING:
        answers = {name: device_.advertise() for name, device_ in devices.items()}
    else:
        answers = {name: devices[name].answer(message) for name, message in messages.items()}
    for name, answer in answers.items():
        if name in gone:
            server.drop(name)
        else:
            (between or server.receive)(name, answer)
    return server.advance()


def run(server: group.Group, devices: dict, *, drop_outs: dict | None = None) -> None:
    """Runs a group to its end.

    Args:
      server: The group.
      devices: Participants by name.
      drop_outs: By phase, whose answers never arrive.
    """
    messages: dict = {}
    while server.phase not in (group.Phase.DONE, group.Phase.LOST):
        gone = (drop_outs or {}).get(server.phase, ())
        messages = step(server, devices, messages, gone=gone)
