"""Tests of the optimiser's objective: its value, and its gradient by finite differences."""

import math

import numpy as np
import pytest

from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms.numerics import blt_losses, blt_objective
from tff_dpftrl.participation import schema as schema_lib

_SCHEMAS = [
    (2, 1, 2),
    (50, 60, 1),
    (100, 1, 100),
    (2052, 342, 6),
    (10**6, 100, 9000),
    (10**9, 10**5, 5),
]


@pytest.mark.parametrize("minimize_rms", [False, True])
@pytest.mark.parametrize("n,b,k", _SCHEMAS)
@pytest.mark.parametrize(
    "num_buffers", [1, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_value_and_gradient(minimize_rms, n, b, k, num_buffers):
    schema = schema_lib.MinSep(n, b, k)
    gaps = np.random.default_rng(num_buffers).uniform(0.1, 1.5, (4, 2 * num_buffers))
    chains = -np.cumsum(gaps, axis=1)[:, ::-1]
    value, gradient = blt_objective.log_loss(chains, schema, minimize_rms)
    for chain, computed in zip(chains, value, strict=True):
        poles, zeros = np.exp(chain[0::2]), np.exp(chain[1::2])
        strategy = blt.Blt(1.0 - poles, blt_losses.pole_residues(poles, zeros))
        loss = strategy.rms_loss(schema) if minimize_rms else strategy.max_loss(schema)
        assert computed == pytest.approx(math.log(loss), abs=1e-9)
    # Fourth order: the error is about h⁴ + 1e-16 / h.
    h = 1e-3
    for i in range(2 * num_buffers):
        at = [
            blt_objective.log_loss(chains + step * h * np.eye(2 * num_buffers)[i], schema,
                                   minimize_rms)[0]
            for step in (-2, -1, 1, 2)
        ]  # fmt: skip
        difference = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h)
        np.testing.assert_allclose(gradient[:, i], difference, atol=1e-9)
