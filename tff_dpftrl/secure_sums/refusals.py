"""Errors by which a device refuses to go on.

A device that raises one of these has revealed nothing in that step, has forgotten its secrets
and answers nothing more in that session.
"""

from __future__ import annotations


class ProtocolRefusedError(Exception):
    """The device refuses a message of the server; the text names the reason."""


class MalformedMessageError(ProtocolRefusedError):
    """A message that no server of this protocol sends."""


class OutOfOrderError(ProtocolRefusedError):
    """A message of another phase than the session is in."""


class RepeatedMessageError(ProtocolRefusedError):
    """A message of a kind that has been answered in this session."""


class BothKindsOfSharesError(RepeatedMessageError):
    """Other survivors, after some were named: shares of both secrets of one device."""


class SessionOverError(ProtocolRefusedError):
    """A message after the last one, or after a refusal."""


class OwnKeysReplacedError(ProtocolRefusedError):
    """A directory without this device, or with keys that it has not made in this session."""


class EqualKeysError(ProtocolRefusedError):
    """A directory in which a key occurs twice."""


class WeakKeyError(ProtocolRefusedError):
    """A public key that is not a point of large order in its canonical form."""


class ForgedKeysError(ProtocolRefusedError):
    """Keys of a neighbour that its identity key has not signed for this session."""


class UnprovenIdentityError(ProtocolRefusedError):
    """An identity key without a valid proof that a genuine device made it."""


class NoisePartyMissingError(ProtocolRefusedError):
    """A directory without a noise party that this device was promised."""


class UnknownNoisePartyError(ProtocolRefusedError):
    """A directory with a noise party that was not promised, or with one of them twice."""


class ForgedNoisePartyError(ProtocolRefusedError):
    """A noise party's key that it has not signed for this session, context and layout."""


class LowThresholdError(ProtocolRefusedError):
    """A threshold that lets too few devices recover a secret."""


class TooFewDevicesError(ProtocolRefusedError):
    """A group, or what is left of it, that is smaller than this device demands."""


class TooManyDevicesError(ProtocolRefusedError):
    """A group that is larger than this device takes part in."""


class TooFewNeighboursError(ProtocolRefusedError):
    """Fewer neighbours than this device demands."""


class TooFewSurvivorsError(ProtocolRefusedError):
    """A sum of fewer devices than this device, or the threshold, demands."""


class NotASurvivorError(ProtocolRefusedError):
    """A sum without the masked vector that this device has sent."""


class UnknownSurvivorsError(ProtocolRefusedError):
    """Survivors that have never sent shares."""


class OtherSurvivorsError(ProtocolRefusedError):
    """A neighbour's signature over other keys or survivors than this device received."""


class TooFewSignaturesError(ProtocolRefusedError):
    """Fewer signatures over the survivors than the threshold demands."""
