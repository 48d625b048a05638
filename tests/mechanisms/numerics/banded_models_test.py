"""Tests of the models' noise of banded matrices, block by block."""

import numpy as np
import pytest

from tff_dpftrl.mechanisms import banded, workload
from tff_dpftrl.mechanisms.numerics import banded_models

_RULES = [
    workload.UpdateRule(
        momentum=0.7, warmup_rounds=3, decay="cosine", averaging=0.8, weight_decay=0.1
    ),
    workload.UpdateRule(momentum=0.5, adam=True, restarts=(5,), rate_before_momentum=True),
]


@pytest.mark.parametrize("rule", _RULES)
@pytest.mark.parametrize("num_rounds, bands", [(14, 4), (12, 12), (15, 5), (9, 1)])
def test_variances_and_gradients(rule, num_rounds, bands):
    generator = np.random.default_rng(bands)
    rows = 0.3 * generator.normal(size=(num_rounds, bands))
    rows[:, 0] = generator.uniform(1.0, 2.0, num_rounds)
    rows[:bands] = np.tril(rows[:bands])
    made = rule.workload(num_rounds)
    models = banded_models.BandedModels(made, bands)
    noise = made.matrix() @ banded.Banded(rows).noise_matrix(num_rounds)
    expected = np.sum(np.square(noise), axis=1)
    weights = generator.uniform(size=num_rounds)
    variances, gradient = models.weighted_error_gradient(rows, lambda variances: weights)
    np.testing.assert_allclose(variances, expected, rtol=1e-12)
    np.testing.assert_allclose(models.variances(rows), expected, rtol=1e-12)
    h = 1e-5
    for t in range(num_rounds):
        for j in range(bands):
            step = np.zeros_like(rows)
            step[t, j] = h if j <= t else 0.0
            change = models.variances(rows + step) - models.variances(rows - step)
            assert gradient[t, j] == pytest.approx(weights @ change / (2 * h), rel=1e-6, abs=1e-6)
