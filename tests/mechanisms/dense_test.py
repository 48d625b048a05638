"""Tests of dense strategies."""

import json

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import dense

_MATRIX = examples.lower(signed=True)


def test_recipe_redraws_the_past():
    strategy = dense.Dense(_MATRIX)
    draws = np.random.default_rng(2).normal(size=12)
    emitted = [
        sum(weight * draws[t - j] for j, weight in enumerate(row))
        for t, row in enumerate(strategy.noise_recipe().rows)
    ]
    np.testing.assert_allclose(emitted, np.linalg.solve(_MATRIX, draws), atol=1e-12)
    assert strategy.memory_copies(12) == 0


def test_blocks_cost_memory_and_save_draws():
    strategy = dense.Dense(_MATRIX, rounds_at_once=5)
    assert strategy.memory_copies(12) == 5
    assert strategy.noise_recipe().rounds_at_once == 5
    # Blocks begin at 0, 5 and 10, and need the draws up to their last rounds.
    assert strategy.draws_per_round(12) == (5 + 10 + 12) / 12
    assert dense.Dense(_MATRIX).draws_per_round(12) == 13 / 2
    values = json.loads(json.dumps(strategy.to_dict()))
    assert dense.Dense.from_dict(values).rounds_at_once == 5
    assert "rounds_at_once" not in dense.Dense(_MATRIX).to_dict()
    for bad in (0, 13, 1.5):
        with pytest.raises(ValueError, match="rounds_at_once"):
            dense.Dense(_MATRIX, rounds_at_once=bad)
    values["rows"][3].append(1.0)
    with pytest.raises(ValueError, match="1, 2, 3"):
        dense.Dense.from_dict(values)


def test_too_many_rounds_cannot_be_run(monkeypatch):
    monkeypatch.setattr(dense, "_MAX_RUN_ROUNDS", 11)
    strategy = dense.Dense(_MATRIX)
    with pytest.raises(ValueError, match="12 rounds cannot be run: 11 is the most"):
        strategy.noise_recipe()
    assert strategy.rms_error(12) > 0.0
    assert dense.Dense(_MATRIX[:11, :11]).noise_recipe().max_rounds == 11


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
