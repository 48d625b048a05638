"""Noise parties are audited with their ledger; noise that is given twice is found."""

from __future__ import annotations

import types

import pytest

from tff_dpftrl.auditing import served_noise
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt, tree
from tff_dpftrl.private_round import clipping, fixed_clip, party_noise
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib

_ROUNDS = 10
_DIM = 1000  # Padded to 1024.
_ERROR_RATE = 1e-6  # Seeds come from the operating system.
_STRATEGIES = (blt.Blt((0.9, 0.5), (0.3, 0.2)), tree.Tree(_ROUNDS))


def _audit(strategy, num_parties=1, num_rounds=_ROUNDS, multiplier=2.0):
    ratio = party_noise.noise_ratio(strategy, 2.0, _ROUNDS, num_parties)
    encoding = grid.for_bits(_DIM, 40, 20, noise_ratio=ratio)
    made = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=multiplier,
        clients_per_round=40,
        clipping=clipping.FlatClipping(1.0),
        encoded_norm=encoding.inflated_clip_norm(1.0),
    )
    noise = party_noise.PartyNoise(made, [[_DIM]], encoding)
    found = served_noise.audit_noise_parties(noise, strategy, num_rounds, num_parties, _ERROR_RATE)
    return [finding.outcome for finding in found], found


@pytest.mark.parametrize(
    "strategy, num_parties", zip(_STRATEGIES, (1, 2), strict=True), ids=("blt", "tree")
)
def test_noise_parties_are_consistent(strategy, num_parties):
    outcomes, found = _audit(strategy, num_parties)
    assert outcomes == ["consistent"] * 3, found
    assert "In 9 attempts it is as claimed" in found[1].says


def test_noise_of_an_abandoned_attempt_that_is_given_again_is_found(monkeypatch):
    # The server abandons an attempt when it has its noise, and asks for this round again. The
    # ledger forgets the attempt, and there are no fresh bits.
    monkeypatch.setattr(ledger_lib.Ledger, "check", lambda self, row, attempt, session: None)
    monkeypatch.setattr(ledger_lib.Ledger, "give", lambda self, given, first: None)
    monkeypatch.setattr(rows_lib, "secrets", types.SimpleNamespace(token_bytes=bytes))
    outcomes, found = _audit(_STRATEGIES[0])
    assert outcomes == ["consistent", "violated", "consistent"]
    assert "attempts 4 and 5 have the same noise" in found[1].says


def test_noise_that_does_not_stream_on_is_found(monkeypatch):
    # Each row is drawn as if those before had been passed over.
    monkeypatch.setattr(rows_lib.Rows, "prepare", lambda self: None)
    outcomes, _ = _audit(_STRATEGIES[0])
    assert outcomes == ["consistent", "violated", "consistent"]


def test_few_rounds_are_not_tested():
    outcomes, _ = _audit(_STRATEGIES[0], num_rounds=3)
    assert outcomes == ["not tested"]
