"""The pattern that is found against every pattern, and against stated sensitivities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tff_dpftrl.auditing.evidence import worst_pattern
from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    restarts,
    table,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

_ROUNDS = 8
_RANDOM = np.tril(np.random.default_rng(0).normal(size=(_ROUNDS, _ROUNDS)), -1) + 2 * np.eye(
    _ROUNDS
)
_BLT = blt.Blt((0.95, 0.5), (0.3, 0.2))
_SMALL = {
    "identity": identity.Identity(),
    "blt": _BLT,
    "tree": tree.Tree(_ROUNDS),
    "full tree": tree.FullTree(),
    "banded": banded.Banded([[1.0, 0.0], *[[1.0 + t / 9, 0.5] for t in range(_ROUNDS - 1)]]),
    "rising": banded_toeplitz.BandedToeplitz((1.0, 0.1, 0.8)),
    "signed": banded_toeplitz.BandedToeplitz((1.0, -0.4, 0.3)),
    "oscillating": inverse_banded.InverseBanded((1.0, 0.6)),
    "dense": dense.Dense(_RANDOM),
    "restarted tree": restarts.Restarted(tree.Tree(_ROUNDS), (0, 3)),
    "restarted blt": restarts.Restarted(_BLT, (0, 5)),
}


def _by_brute_force(matrix, schema):
    best = 0.0
    for pattern in schema.patterns():
        signs = np.array(
            [(1, *rest) for rest in itertools.product((1, -1), repeat=len(pattern) - 1)]
        )
        moved = signs @ matrix[:, list(pattern)].T
        best = max(best, float(np.sqrt(np.max(np.sum(moved**2, axis=1)))))
    return best


@pytest.mark.parametrize("name", _SMALL)
@pytest.mark.parametrize("min_sep, count", [(1, 3), (2, 2), (2, 4), (3, 3), (5, 2), (8, 1)])
def test_no_pattern_is_worse_in_few_rounds(name, min_sep, count):
    schema = schema_lib.MinSep(_ROUNDS, min_sep, count)
    matrix = _SMALL[name].strategy_matrix(_ROUNDS)
    found = worst_pattern.worst_pattern(_SMALL[name], schema)
    assert schema.allows(found.rounds) and list(found.rounds) == sorted(found.rounds)
    attained = float(np.linalg.norm(matrix @ found.signal(_ROUNDS)))
    assert found.norm == pytest.approx(attained, rel=1e-12)
    assert attained == pytest.approx(_by_brute_force(matrix, schema), rel=1e-9)


def test_contributions_change_sign_where_that_is_worse():
    found = worst_pattern.worst_pattern(_SMALL["oscillating"], schema_lib.MinSep(_ROUNDS, 1, 8))
    assert found.signs == (1, -1) * 4
    steady = worst_pattern.worst_pattern(_BLT, schema_lib.MinSep(_ROUNDS, 1, 8))
    assert steady.signs == (1,) * 8


@pytest.mark.parametrize("starts", [(0,), (0, 33, 53)], ids=["whole", "restarted"])
@pytest.mark.parametrize(
    "name", ["blt", "bandtoep", "bandfhu", "bisr", "tree", "tree-vanilla", "tree-full", "identity"]
)
@pytest.mark.parametrize(
    "min_sep, count",
    [
        (13, 8),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(20, 5), (7, 4), (3, 10)]),
    ],
)
def test_the_norm_is_the_sensitivity_in_a_hundred_rounds(name, starts, min_sep, count):
    schema = schema_lib.MinSep(100, min_sep, count)
    strategy = table.build(name, schema, starts=starts)
    sensitivity = strategy.sensitivity(schema)
    found = worst_pattern.worst_pattern(strategy, schema)
    assert sensitivity.exact
    assert found.norm == pytest.approx(sensitivity.value, rel=1e-6)


@pytest.mark.parametrize("name", _SMALL)
def test_covariance_is_that_of_the_noise(name):
    found = worst_pattern.noise_covariance(_SMALL[name], _ROUNDS)
    noise = _SMALL[name].noise_matrix(_ROUNDS)
    np.testing.assert_allclose(found, noise @ noise.T, rtol=1e-9, atol=1e-12)


def test_noise_of_another_strategy_is_refused(monkeypatch):
    strategy = tree.Tree(_ROUNDS)
    right = strategy.noise_matrix(_ROUNDS)
    monkeypatch.setattr(tree.Tree, "noise_matrix", lambda self, num_rounds: right / 2.0)
    with pytest.raises(ValueError, match="N C = I"):
        worst_pattern.noise_covariance(strategy, _ROUNDS)


def test_trees_release_less_than_their_nodes_and_others_all():
    schema = schema_lib.MinSep(60, 12, 5)
    norms = {}
    for name in ("tree", "tree-vanilla", "tree-full", "blt"):
        strategy = table.build(name, schema)
        covariance = worst_pattern.noise_covariance(strategy, 60)
        found = worst_pattern.strongest_pattern(covariance, schema)
        assert schema.allows(found.rounds)
        norms[name] = found.norm / strategy.sensitivity(schema).value
    assert norms["blt"] == pytest.approx(1.0, rel=1e-6)
    assert norms["tree-full"] == pytest.approx(1.0, rel=1e-6)
    assert norms["tree-vanilla"] < 0.99
    assert norms["tree"] < 0.99
