"""Tests of the search for the best power of (1 - x)."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tff_dpftrl.mechanisms import inverse_banded, inverse_banded_optimize
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
