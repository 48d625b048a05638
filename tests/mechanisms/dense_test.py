"""Tests of dense strategies."""

import json

import numpy as np
import pytest

from tff_dpftrl.mechanisms import dense
from tff_dpftrl.participation import schema as schema_lib


def _matrix(num_rounds=12, *, signed=True):
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(num_rounds,) * 2) if signed else rng.random((num_rounds,) * 2)
    return np.tril(matrix, -1) + np.diag(2.0 + rng.random(num_rounds))


@pytest.mark.parametrize("num_rounds", [1, 5, 12])
def test_matrices_and_variances(num_rounds):
    strategy = dense.Dense(_matrix())
    noise = np.linalg.inv(_matrix()[:num_rounds, :num_rounds])
    np.testing.assert_allclose(strategy.noise_matrix(num_rounds), noise, atol=1e-12)
    np.testing.assert_allclose(
        strategy.round_noise_variance(num_rounds), np.sum(noise**2, axis=1), rtol=1e-10
    )
    np.testing.assert_allclose(
        strategy.prefix_noise_variance(num_rounds),
        np.sum(np.cumsum(noise, axis=0) ** 2, axis=1),
        rtol=1e-10,
    )


def test_every_participation_sums_the_columns():
    matrix = _matrix(signed=False)
    result = dense.Dense(matrix).sensitivity(schema_lib.MinSep(12, 1, 12))
    assert result.squared >= np.sum(matrix.sum(axis=1) ** 2)


def test_recipe_redraws_the_past():
    strategy = dense.Dense(_matrix())
    draws = np.random.default_rng(2).normal(size=12)
    emitted = [
        sum(weight * draws[t - j] for j, weight in enumerate(row))
        for t, row in enumerate(strategy.noise_recipe().rows)
    ]
    np.testing.assert_allclose(emitted, np.linalg.solve(_matrix(), draws), atol=1e-12)
    assert strategy.memory_copies(12) == 0


def test_blocks_cost_memory_and_save_draws():
    strategy = dense.Dense(_matrix(), rounds_at_once=5)
    assert strategy.memory_copies(12) == 5
    assert strategy.noise_recipe().rounds_at_once == 5
    # Blocks begin at 0, 5 and 10, and need the draws up to their last rounds.
    assert strategy.draws_per_round(12) == (5 + 10 + 12) / 12
    assert dense.Dense(_matrix()).draws_per_round(12) == 13 / 2
    values = json.loads(json.dumps(strategy.to_dict()))
    assert dense.Dense.from_dict(values).rounds_at_once == 5
    assert "rounds_at_once" not in dense.Dense(_matrix()).to_dict()


@pytest.mark.parametrize("bad", [0, 13, 1.5])
def test_bad_blocks_are_refused(bad):
    with pytest.raises(ValueError, match="rounds_at_once"):
        dense.Dense(_matrix(), rounds_at_once=bad)


def test_too_many_rounds_cannot_be_run(monkeypatch):
    monkeypatch.setattr(dense, "_MAX_RUN_ROUNDS", 11)
    strategy = dense.Dense(_matrix())
    with pytest.raises(ValueError, match="12 rounds cannot be run: 11 is the most"):
        strategy.noise_recipe()
    assert strategy.rms_error(12) > 0.0
    assert dense.Dense(_matrix(11)).noise_recipe().max_rounds == 11


def test_round_trip_through_json():
    strategy = dense.Dense(_matrix())
    values = json.loads(json.dumps(strategy.to_dict()))
    assert values["mechanism"] == "dense"
    np.testing.assert_array_equal(dense.Dense.from_dict(values).strategy_matrix(12), _matrix())
    values["rows"][3].append(1.0)
    with pytest.raises(ValueError, match="1, 2, 3"):
        dense.Dense.from_dict(values)


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(3),
        np.ones((2, 3)),
        np.zeros((0, 0)),
        np.ones((2, 2)),
        np.diag([1.0, 0.0]),
        np.diag([1.0, -1.0]),
        np.diag([1.0, np.nan]),
    ],
)
def test_bad_matrices_are_refused(bad):
    with pytest.raises(ValueError, match="matrix must"):
        dense.Dense(bad)


def test_more_rounds_than_rows_are_refused():
    with pytest.raises(ValueError, match="num_rounds must be in 1 ... 12"):
        dense.Dense(_matrix()).noise_matrix(13)
