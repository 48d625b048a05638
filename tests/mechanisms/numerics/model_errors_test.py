"""Tests of the errors of models: against dense matrices, gradients by finite differences."""

import numpy as np
import pytest

from tff_dpftrl.mechanisms import workload
from tff_dpftrl.mechanisms.numerics import blt_objective, model_errors, toeplitz
from tff_dpftrl.participation import schema as schema_lib

_N = 15
_CASES = [
    (workload.UpdateRule(momentum=0.9), 1.0),
    (workload.UpdateRule(momentum=0.9), np.inf),
    (workload.UpdateRule(momentum=0.5, decay="cosine"), 1.0),
    (workload.UpdateRule(momentum=0.5, decay="cosine"), 16.0),
    (workload.UpdateRule(averaging=0.8, weight_decay=0.2, decay="linear"), 3.0),
]


def _slopes(function, at):
    """Computes derivatives of fourth order."""
    h = 1e-3
    slopes = []
    for i in range(len(at)):
        steps = np.outer([-2, -1, 1, 2], h * np.eye(len(at))[i])
        slopes.append(np.array([function(at + step) for step in steps]) @ [1, -8, 8, -1] / (12 * h))
    return np.array(slopes)


@pytest.mark.parametrize("rule, power", _CASES)
def test_value_and_gradient(rule, power):
    made = rule.workload(_N)
    errors = model_errors.ModelErrors(made, power)
    columns = np.random.default_rng(0).uniform(-0.3, 0.1, (2, _N))
    columns[:, 0] = 1.0
    values, gradients = errors.squared(columns)
    for column, value, gradient in zip(columns, values, gradients, strict=True):
        variances = np.sum(np.square(made.matrix() @ toeplitz.matrix(column, _N)), axis=1)
        assert value == pytest.approx(
            variances.max() if power == np.inf else np.mean(variances**power) ** (1 / power)
        )
        slopes = _slopes(lambda x: errors.squared(x[np.newaxis])[0][0], column)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-8 * np.abs(slopes).max())


def test_gradients_reach_the_coefficients_of_c():
    weights = np.random.default_rng(1).normal(size=_N)
    c = np.append(1.0, np.random.default_rng(2).uniform(0, 0.3, _N - 1))
    slopes = _slopes(lambda x: weights @ toeplitz.inverse_coefficients(x, _N), c)
    found = model_errors.inverse_gradient(weights, toeplitz.inverse_coefficients(c, _N))
    np.testing.assert_allclose(found, slopes, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("rule, power", _CASES)
def test_gradients_reach_the_chain_of_a_blt(rule, power):
    errors = model_errors.ModelErrors(rule.workload(_N), power)
    schema = schema_lib.MinSep(_N, 4, 4)
    chain = np.array([-3.0, -2.2, -1.0, -0.5])
    value, gradient = blt_objective.log_loss(chain[np.newaxis], schema, False, errors)
    slopes = _slopes(
        lambda x: blt_objective.log_loss(x[np.newaxis], schema, False, errors)[0][0], chain
    )
    np.testing.assert_allclose(gradient[0], slopes, rtol=1e-6, atol=1e-9)
    assert np.isfinite(value[0])


def test_the_prefix_sums_have_the_closed_form():
    one = workload.Recurrence((1.0,) * 50, (1.0,) * 50)
    sums, schema = workload.Workload((one,)), schema_lib.MinSep(50, 10, 5)
    chains = np.array([[-3.0, -2.2, -1.0, -0.5], [-4.0, -1.2, -1.0, -0.9]])
    for minimize_rms in (True, False):
        (errors,) = model_errors.stages(sums, minimize_rms)
        closed = blt_objective.log_loss(chains, schema, minimize_rms)
        found = blt_objective.log_loss(chains, schema, minimize_rms, errors)
        np.testing.assert_allclose(found[0], closed[0], rtol=1e-12)
        np.testing.assert_allclose(found[1], closed[1], rtol=1e-9)
