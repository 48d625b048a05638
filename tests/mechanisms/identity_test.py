"""Tests of the identity strategy."""

import numpy as np

from tff_dpftrl.mechanisms import identity, noise_recipe
from tff_dpftrl.participation import schema as schema_lib


def test_it_is_independent_noise():
    strategy = identity.Identity()
    assert strategy.noise_recipe() == noise_recipe.IdentityNoise()
    assert strategy.memory_copies(100) == 0
    assert strategy.max_rounds is None
    noise = strategy.noise_matrix(7)
    np.testing.assert_array_equal(noise @ strategy.strategy_matrix(7), np.eye(7))
    prefix = np.cumsum(noise, axis=0)
    np.testing.assert_array_equal(strategy.prefix_noise_variance(7), np.sum(prefix**2, axis=1))
    np.testing.assert_array_equal(strategy.round_noise_variance(7), np.sum(noise**2, axis=1))


def test_sensitivity_counts_participations_that_fit():
    strategy = identity.Identity()
    for n, b, k in [(10, 3, 2), (10, 3, 9), (1, 1, 1), (12, 12, 4)]:
        schema = schema_lib.MinSep(n, b, k)
        expected = max(len(pattern) for pattern in schema.patterns())
        sensitivity = strategy.sensitivity(schema)
        assert (sensitivity.squared, sensitivity.exact) == (expected, True)


def test_dictionary_round_trip():
    strategy = identity.Identity()
    assert identity.Identity.from_dict(strategy.to_dict()) == strategy
