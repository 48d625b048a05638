"""Tests of the searches for the best power of (1 - x), and for the best coefficients."""

import itertools

import numpy as np
import pytest

from tff_dpftrl.mechanisms import inverse_banded, inverse_banded_optimize
from tff_dpftrl.mechanisms.numerics import toeplitz
from tff_dpftrl.participation import schema as schema_lib


@pytest.mark.parametrize("minimize_rms", [True, False])
@pytest.mark.parametrize("bands", [2, 5, 30])
def test_tuned_gamma_is_the_best_on_a_fine_grid(bands, minimize_rms):
    schema = schema_lib.MinSep(300, 50, 4)

    def loss(strategy):
        return strategy.rms_loss(schema) if minimize_rms else strategy.max_loss(schema)

    tuned = inverse_banded_optimize.optimize_bifr(schema, bands, minimize_rms=minimize_rms)
    grid = np.arange(1, 500) / 500
    best = min(loss(inverse_banded.InverseBanded.bifr(bands, gamma)) for gamma in grid)
    assert loss(tuned) <= best
    assert loss(tuned) < loss(inverse_banded.InverseBanded.bisr(bands))


def test_sixteen_bands_by_default():
    schema = schema_lib.MinSep(300, 50, 4)
    sixteen = inverse_banded_optimize.optimize_bifr(schema, 16)
    assert inverse_banded_optimize.optimize_bifr(schema) == sixteen


@pytest.mark.parametrize("minimize_rms", [True, False])
@pytest.mark.parametrize("schema", [(300, 50, 4), (100, 100, 1), (60, 5, 12)])
@pytest.mark.parametrize("bands", [1, 2, 4, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_free_coefficients_are_never_worse_than_bisr_and_bifr(schema, bands, minimize_rms):
    schema = schema_lib.MinSep(*schema)

    def loss(strategy):
        return strategy.rms_loss(schema) if minimize_rms else strategy.max_loss(schema)

    free = inverse_banded_optimize.optimize_inverse_banded(schema, bands, minimize_rms=minimize_rms)
    assert free.bands <= bands
    assert free.sensitivity(schema).exact
    assert loss(free) <= loss(inverse_banded.InverseBanded.bisr(bands))
    bifr = inverse_banded_optimize.optimize_bifr(schema, bands, minimize_rms=minimize_rms)
    assert loss(free) <= loss(bifr)
    if bands == 4 and schema.min_sep > 5:
        assert loss(free) < 0.96 * loss(bifr)


def test_no_coefficients_nearby_are_better():
    # All patterns are tried for each matrix, so that the sensitivity rests on no theorem.
    schema = schema_lib.MinSep(12, 4, 3)
    patterns = [
        rounds
        for count in (1, 2, 3)
        for rounds in itertools.combinations(range(12), count)
        if all(b - a >= 4 for a, b in itertools.pairwise(rounds))
    ]

    def loss(inverse):
        matrix = toeplitz.matrix(np.array(inverse), 12)
        columns = np.abs(np.linalg.inv(matrix))
        squared = max(np.sum(columns[:, list(rounds)].sum(axis=1) ** 2) for rounds in patterns)
        return np.sqrt(squared * np.mean(np.sum(np.cumsum(matrix, axis=0) ** 2, axis=1)))

    free = inverse_banded_optimize.optimize_inverse_banded(schema, 3)
    best = loss(free.inverse_coefficients)
    assert free.rms_loss(schema) == pytest.approx(best, rel=1e-9)
    for first in np.linspace(-1.0, 0.0, 41):
        for second in np.linspace(-0.5, 0.3, 41):
            decreasing = inverse_banded.InverseBanded((1.0, first, second)).coefficients(12)
            if np.all(np.diff(decreasing) <= 0.0) and decreasing[-1] >= 0.0:
                assert best <= loss((1.0, first, second)) * (1 + 1e-4)


def test_the_gradient_is_that_of_finite_differences():
    objective = inverse_banded_optimize._Objective(schema_lib.MinSep(40, 8, 5), True)
    # Coefficients of C that increase in places, and are negative in others.
    free = np.array([-0.6, 0.5, -0.4, 0.1])
    _, gradient = objective(free, 30.0)
    for s in range(4):
        step = 1e-6 * np.eye(4)[s]
        difference = objective(free + step, 30.0)[0] - objective(free - step, 30.0)[0]
        assert gradient[s] == pytest.approx(difference / 2e-6, rel=1e-5)


def test_more_bands_than_rounds_change_nothing():
    schema = schema_lib.MinSep(5, 2, 3)
    free = inverse_banded_optimize.optimize_inverse_banded(schema, 9)
    assert free.bands == 5
    assert inverse_banded_optimize.optimize_inverse_banded(schema_lib.MinSep(1, 1, 1), 3).bands == 1
    with pytest.raises(ValueError, match="bands"):
        inverse_banded_optimize.optimize_inverse_banded(schema_lib.MinSep(5, 2, 3), 0)
