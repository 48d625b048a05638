"""Attestation for a server: its verifier of tokens, from files, and for its threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from typing_extensions import override

from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import secure_aggregator
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.protocol import certificate_attestation, session_stream


def from_files(
    issuers: Sequence[str | os.PathLike[str]] | None,
    roots: str | os.PathLike[str] | None = None,
    revoked: str | os.PathLike[str] | None = None,
) -> attestation_lib.Attestation | None:
    """Makes the verifier of devices' tokens; None if every connection counts as a device.

    There are files of issuers' public keys; or a file of a platform's root certificates, perhaps
    with one of revoked serial numbers.
    """
    if roots is not None:
        return certificate_attestation.CertificateTokens(
            certificate_attestation.read_certificates(roots),
            revoked=() if revoked is None else certificate_attestation.read_revoked(revoked),
            clock=time.time,
        )
    if issuers is None:
        return None
    return attestation_lib.SignedTokens(map(signing_keys.load_public, issuers), clock=time.time)


class LockedAttestation(attestation_lib.Attestation):
    """A lock around an attestation: the event loop and the Aggregators' threads share it."""

    def __init__(self, attestation: attestation_lib.Attestation):
        """Wraps an attestation."""
        self._attestation = attestation
        self._lock = threading.Lock()

    @override
    def verify(self, token: bytes, nonce: bytes) -> attestation_lib.Verdict:
        with self._lock:
            return self._attestation.verify(token, nonce)


def verifier(
    attestation: LockedAttestation | None, population: str
) -> secure_aggregator.VerifyIdentity | None:
    """Makes the function that verifies devices' identity keys in secure sums; None if none does.

    It lets an Aggregator refuse a single device. Otherwise the other devices would refuse the key,
    and the whole group would be lost.
    """
    if attestation is None:
        return None

    def verify_identity(session: bytes, identity_key: bytes, proof: bytes) -> bool:
        nonce = session_stream.identity_nonce(session, population, identity_key)
        return attestation.verify(proof, nonce) is attestation_lib.Verdict.GENUINE

    return verify_identity
