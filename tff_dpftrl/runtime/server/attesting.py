"""Attestation as several threads of a server ask for it."""

from __future__ import annotations

import threading

from typing_extensions import override

from tff_dpftrl.runtime.actors import secure_aggregator
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.protocol import session_stream


class OneAtATime(attestation_lib.Attestation):
    """Asked by the event loop for check-ins, and by Aggregators' threads for secure sums."""

    def __init__(self, attestation: attestation_lib.Attestation):
        """Takes the attestation that is asked."""
        self._attestation = attestation
        self._lock = threading.Lock()

    @override
    def verify(self, token: bytes, nonce: bytes) -> attestation_lib.Verdict:
        with self._lock:
            return self._attestation.verify(token, nonce)


def verifier(
    attestation: OneAtATime | None, population: str
) -> secure_aggregator.VerifyIdentity | None:
    """How Aggregators of secure sums verify identities of devices.

    Args:
      attestation: Verifies tokens; None if whoever connects is a device.
      population: Name of the population.

    Returns:
      What `cast.Cast` is to be given: who would be refused by its group, which would be lost
      with it, is refused alone.
    """
    if attestation is None:
        return None

    def verify_identity(session: bytes, identity_key: bytes, proof: bytes) -> bool:
        nonce = session_stream.identity_nonce(session, population, identity_key)
        return attestation.verify(proof, nonce) is attestation_lib.Verdict.GENUINE

    return verify_identity
