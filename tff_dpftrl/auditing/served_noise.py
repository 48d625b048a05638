"""Audit of a task's noise parties: it plays the server against a party and its ledger.

It runs what `tff-dpftrl noise-party` runs (ledger, noise and protocol) and what a device runs, on a
small vector. The server asks for the noise of one round after the other. It abandons one attempt
when it has the noise, and asks for the noise of the same round again.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.auditing import audit_report, secure_server
from tff_dpftrl.auditing.evidence import worst_pattern
from tff_dpftrl.auditing.recount import findings
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import party_noise
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib
from tff_dpftrl.secure_sums import noise_party, parameters, vectors

_MOST_ROUNDS = 12
_FEWEST_ROUNDS = 4
_CONTEXT = b"audit of noise parties"
_NOISED = 1  # Number of the segment with noise.


class _Parties:
    """Noise parties with a ledger each; as `runtime.noise_party.party`, without a connection."""

    def __init__(
        self,
        noise: party_noise.PartyNoise,
        keys: Sequence[ed25519.Ed25519PrivateKey],
        folder: pathlib.Path,
        asked: Sequence[int],
    ):
        self._keys, self._asked = keys, asked
        self._ledgers = [
            ledger_lib.Ledger.open(folder / f"party{i}.ledger", "audit", "")
            for i in range(len(keys))
        ]
        self._rows = [rows_lib.Rows(noise, ledger) for ledger in self._ledgers]
        self._round_seed = np.array([1, 2], np.int64)  # The same in all rounds, which hides least.

    def __call__(
        self,
        demanded: parameters.Parameters,
        session: bytes,
        context: bytes,
        party: int,
        attempt: int,
    ) -> secure_server.Member:
        ledger = self._ledgers[party]
        row = self._asked[attempt] if attempt < len(self._asked) else ledger.next_row
        name = f"attempt {attempt}"
        try:
            ledger.check(row, name, session)
        except ledger_lib.NoiseRefusedError:
            row = ledger.next_row  # The server has to go on there.

        def give() -> vectors.Vector:
            made = vectors.zeros(demanded.layout)
            first = ledger.next_row
            integers, _, entropy = self._rows[party].integers(row, self._round_seed)
            made[_NOISED] = integers.astype(made[_NOISED].dtype)
            devices = demanded.least_devices
            ledger.give(ledger_lib.Given(row, name, session, None, devices, 0.0, entropy), first)
            return made

        return noise_party.NoiseParty(demanded, session, self._keys[party], give, context=context)

    def close(self) -> None:
        """Closes the ledgers."""
        for ledger in self._ledgers:
            ledger.close()


def audit_noise_parties(
    noise: party_noise.PartyNoise,
    strategy: strategy_lib.Strategy,
    num_rounds: int,
    num_parties: int,
    error_rate: float,
) -> tuple[audit_report.Finding, ...]:
    """Audits noise parties against a server that colludes with all devices but one.

    The findings are about what the server sees before the noise, about the noise of each attempt,
    and about what an active server may try.
    """
    if num_rounds < _FEWEST_ROUNDS:
        return (findings.skipped("secure sum: noise parties", f"it takes {_FEWEST_ROUNDS} rounds"),)
    keys = [ed25519.Ed25519PrivateKey.generate() for _ in range(num_parties)]
    encoding = noise.encoding
    demanded = parameters.Parameters(
        (
            vectors.Segment(1, 2**32),
            vectors.Segment(encoding.padded_dim, encoding.sum_modulus),
        ),
        parameters.ThreatModel.HONEST_BUT_CURIOUS,
        least_devices=2,
        noise_parties=tuple(key.public_key().public_bytes_raw() for key in keys),
    )
    number = min(num_rounds - 1, _MOST_ROUNDS)  # One more is for the active server.
    abandoned = number // 2
    asked = [*range(abandoned), *range(abandoned - 1, number - 1)]
    with tempfile.TemporaryDirectory() as folder:
        parties = _Parties(noise, keys, pathlib.Path(folder), asked)
        try:
            attempts = secure_server.play(demanded, parties, [_CONTEXT] * number)
            active = secure_server.refused(demanded, parties, attempt=number)
        finally:
            parties.close()
    unit = worst_pattern.noise_covariance(strategy, number)
    covers = (audit_report.Covered.of("noise-party rounds", asked, num_rounds),)
    return (
        *(
            dataclasses.replace(finding, covers=covers)
            for finding in (
                secure_server.hidden(demanded, attempts, error_rate / 2.0),
                secure_server.noise(
                    demanded,
                    attempts,
                    _NOISED,
                    num_parties * noise.stddev**2 * unit,
                    error_rate / 2.0,
                ),
            )
        ),
        active,
    )
