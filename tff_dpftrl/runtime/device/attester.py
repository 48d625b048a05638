"""Attestation of a device at check-in: an interface, and attesters with keys in files."""

from __future__ import annotations

import abc
import os

from typing_extensions import override

from tff_dpftrl.runtime.protocol import attestation, certificate_attestation


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
        """Wraps an issuer."""
        self._issuer = issuer

    @override
    def token(self, nonce: bytes) -> bytes:
        return self._issuer.issue(nonce)


class CertificateAttester(Attester):
    """Attester with a key that a platform's vendor certified, as an example.

    On a real device, the key is in secure hardware, and only the hardware signs with it. The server
    sees the certificate in every session: it must be that of a large batch of devices.
    """

    def __init__(self, chain: str | os.PathLike[str], key: str | os.PathLike[str]):
        """Reads the PEM files of the certificates (without the root) and of the private key.

        It raises ValueError if they do not fit each other.
        """
        self._chain, self._key = certificate_attestation.read_device(chain, key)

    @override
    def token(self, nonce: bytes) -> bytes:
        return certificate_attestation.make_token(nonce, self._chain, self._key)
