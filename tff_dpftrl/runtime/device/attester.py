"""Attestation of a device at check-in: an interface, and an attester with the issuer's key."""

from __future__ import annotations

import abc

from typing_extensions import override

from tff_dpftrl.runtime.protocol import attestation


class Attester(abc.ABC):
    """Source of attestation tokens; on a phone, the platform's attestation service."""

    @abc.abstractmethod
    def token(self, nonce: bytes) -> bytes | None:
        """Requests a token for one use.

        Args:
          nonce: Bytes to which the token is bound, `attestation.NONCE_BYTES` of them.

        Returns:
          The token; None if there is none for this device.
        """


class NoAttester(Attester):
    """Attester without tokens, for servers that ask for none."""

    @override
    def token(self, nonce: bytes) -> None:
        del nonce


class IssuingAttester(Attester):
    """Attester that issues its own tokens, for demonstrations and tests only.

    In production no device may have the issuer's key: its holder can pose as any number of
    devices.
    """

    def __init__(self, issuer: attestation.TokenIssuer):
        """Wraps an issuer.

        Args:
          issuer: Issuer of the tokens.
        """
        self._issuer = issuer

    @override
    def token(self, nonce: bytes) -> bytes:
        return self._issuer.issue(nonce)
