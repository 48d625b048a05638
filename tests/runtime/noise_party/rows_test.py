"""Noise of a party's rows: new in each attempt, with the past that its ledger says."""

from __future__ import annotations

import itertools
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.auditing.evidence import worst_pattern
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt, dense, identity, restarts, tree
from tff_dpftrl.private_round import clipping, discretize, fixed_clip, party_noise
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib

_NUM_ROUNDS = 8
_ROUND_SEED = np.array([3, 4])
_BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_DENSE = np.tril(1 / (1 + np.abs(np.subtract.outer(range(_NUM_ROUNDS), range(_NUM_ROUNDS)))))
_STRATEGIES = {
    "identity": identity.Identity(),
    "blt": _BLT,
    "dense": dense.Dense(_DENSE),
    "dense at once": dense.Dense(_DENSE, rounds_at_once=3),
    "tree": tree.Tree(_NUM_ROUNDS),
    "vanilla tree": tree.Tree(_NUM_ROUNDS, variance_reduction=False),
    "tree with restarts": restarts.Restarted(tree.Tree(5), (0, 5)),
}


@pytest.fixture(autouse=True)
def _eagerly():
    """Runs without graphs, whose tracing takes seconds; `party_noise_test` has them."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def _noise(strategy, dim):
    ratio = party_noise.noise_ratio(strategy, 1.5, _NUM_ROUNDS)
    encoding = grid.for_bits(dim, 10, 24, noise_ratio=ratio)
    made = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=1.5,
        clients_per_round=4,
        clipping=clipping.FlatClipping(1.0),
        encoded_norm=encoding.inflated_clip_norm(1.0),
        secure_noise=True,
    )
    return party_noise.PartyNoise(made, [(dim,)], encoding)


class _Party:
    """Ledger and noise in a folder, as after a start."""

    def __init__(self, noise, folder):
        self._noise = noise
        folder.mkdir(exist_ok=True)
        self.ledger = ledger_lib.Ledger.open(folder / "ledger", "task", "")
        self.rows = rows_lib.Rows(noise, self.ledger, folder / "checkpoint")

    def give(self, row):
        """Gives a row; returns its unit noise, rotated."""
        first = self.ledger.next_row
        vector, _, entropy = self.rows.integers(row, _ROUND_SEED)
        given = ledger_lib.Given(row, f"{row}", bytes([row]) * 32, None, 3, 0.0, entropy)
        self.ledger.give(given, first)
        modulus = self._noise.encoding.sum_modulus
        centred = discretize.to_centre(tf.constant(vector, tf.int32), modulus)
        return centred.numpy() / self._noise.stddev


@pytest.mark.parametrize("strategy", [pytest.param(s, id=name) for name, s in _STRATEGIES.items()])
def test_a_backup_that_goes_on_shares_its_past_and_no_draw(strategy, tmp_path):
    noise = _noise(strategy, 20_000)
    backup, party = tmp_path / "backup", _Party(noise, tmp_path / "party")
    vectors = [party.give(row) for row in (0, 2)]  # Round 1 is passed over, and 5 in both.
    shutil.copytree(tmp_path / "party", backup)
    vectors += [party.give(row) for row in (3, 4, 6, 7)]
    restored = _Party(noise, backup)
    vectors += [restored.give(row) for row in (4, 6, 7)]
    # Each round has one new draw, so that the weights of the draws are lower triangular.
    weights = np.linalg.cholesky(worst_pattern.noise_covariance(strategy, _NUM_ROUNDS))
    past, own = weights[:, :3], weights[:, 3:]
    joint = np.block([[past, own, 0 * own], [past, 0 * own, own]])
    joint = joint[[0, 2, 3, 4, 6, 7, *(_NUM_ROUNDS + row for row in (4, 6, 7))]]
    expected, found = joint @ joint.T, np.stack(vectors)
    size = found.shape[1]
    variance = np.diag(expected)
    # Six standard errors of each entry.
    bound = 6 * np.sqrt((np.outer(variance, variance) + expected**2) / size)
    assert np.all(np.abs(found @ found.T / size - expected) < bound)


def test_an_attempt_that_was_not_given_its_noise_leaves_none_for_the_next(tmp_path):
    party = _Party(_noise(_BLT, 10), tmp_path)
    one, other = (party.rows.integers(0, _ROUND_SEED)[0] for _ in range(2))
    assert not np.array_equal(one, other)


@pytest.fixture(name="bits")
def _bits(monkeypatch):
    """Fresh bits that two parties have in common, to compare the rest of their noise."""
    number = itertools.count()

    def renew():
        made = next(number).to_bytes(32, "little")
        source = types.SimpleNamespace(token_bytes=lambda size: made)
        monkeypatch.setattr(rows_lib, "secrets", source)

    return renew


@pytest.mark.parametrize("strategy", [pytest.param(s, id=name) for name, s in _STRATEGIES.items()])
def test_a_restart_makes_the_same_past(strategy, tmp_path, bits, monkeypatch):
    monkeypatch.setattr(rows_lib, "_ROWS_BETWEEN_CHECKPOINTS", 2)
    noise = _noise(strategy, 10)
    party = _Party(noise, tmp_path / "party")
    for row in (0, 1, 3, 6):
        bits()
        party.rows.integers(row, _ROUND_SEED)  # An attempt that fails before it gets noise.
        bits()
        folders = [tmp_path / f"{row} {name}" for name in ("with", "without")]
        for folder in folders:
            shutil.copytree(tmp_path / "party", folder)
        (folders[1] / "checkpoint").unlink(missing_ok=True)
        expected = party.give(row)
        for folder in folders:
            np.testing.assert_array_equal(_Party(noise, folder).give(row), expected)


def test_a_checkpoint_of_another_branch_is_not_used(tmp_path, bits, monkeypatch):
    monkeypatch.setattr(rows_lib, "_ROWS_BETWEEN_CHECKPOINTS", 2)
    noise = _noise(_BLT, 10)
    party = _Party(noise, tmp_path / "party")
    for row in range(2):
        bits()
        party.give(row)
    shutil.copytree(tmp_path / "party", tmp_path / "backup")
    for row in range(2, 6):
        bits()
        party.give(row)
    restored = _Party(noise, tmp_path / "backup")
    for row in range(2, 7):
        bits()
        mixed = tmp_path / f"{row}"
        shutil.copytree(tmp_path / "backup", mixed)
        shutil.copy(tmp_path / "party" / "checkpoint", mixed)  # Before row 4, with other noise.
        np.testing.assert_array_equal(_Party(noise, mixed).give(row), restored.give(row))


def test_a_reduced_tree_of_an_earlier_version_is_refused(tmp_path):
    noise = _noise(_STRATEGIES["tree"], 10)
    ledger = _Party(noise, tmp_path).ledger
    ledger.give(ledger_lib.Given(0, "0", b"s" * 32, None, 3, 0.0, bytes(32)), 0)
    with pytest.raises(ValueError, match="an earlier version has given noise of this tree"):
        rows_lib.Rows(noise, ledger)
    rows_lib.Rows(_noise(_BLT, 10), ledger)
