"""Who vouches for a device at check-in: an interface, and one that has the issuer's key."""

from __future__ import annotations

import abc

from typing_extensions import override

from tff_dpftrl.runtime.protocol import attestation


class Attester(abc.ABC):
    """Has tokens made for a device; on a phone, the platform's attestation service."""

    @abc.abstractmethod
    def token(self, nonce: bytes) -> bytes | None:
        """Has a token made, which is used once.

        Args:
          nonce: What it is bound to, `attestation.NONCE_BYTES` bytes.

        Returns:
          The token; None if there is none for this device.
        """


class NoAttester(Attester):
    """For servers that ask for no token."""

    @override
    def token(self, nonce: bytes) -> None:
        del nonce


class IssuingAttester(Attester):
    """Makes tokens by itself: for demonstrations and tests, where devices have the issuer's key.

    Elsewhere nobody's device may have that key: whoever has it can be any number of devices.
    """

    def __init__(self, issuer: attestation.TokenIssuer):
        """Uses an issuer.

        Args:
          issuer: What makes the tokens.
        """
        self._issuer = issuer

    @override
    def token(self, nonce: bytes) -> bytes:
        return self._issuer.issue(nonce)
