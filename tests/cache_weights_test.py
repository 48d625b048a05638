"""Weights of a cache of earlier text, against a grid of them."""

import numpy as np
import pytest

from experiments import cache_weights


def test_weights_are_those_of_the_largest_likelihood():
    rng = np.random.default_rng(0)
    model, cache = rng.uniform(size=(2, 400))
    longest = rng.integers(0, 4, 400)  # Of order 4 there is none.
    found = cache_weights.fit_weights(model, cache, longest)
    assert found[3] == 0.0 and len(set(found)) == 4
    grid = np.linspace(0.0, 1.0, 1001)
    for order, weight in enumerate(found[:3], start=1):
        own = longest == order
        likelihoods = np.log(model[own] + np.outer(grid, cache[own] - model[own])).sum(axis=1)
        assert weight == pytest.approx(grid[likelihoods.argmax()], abs=0.02)
    with pytest.raises(ValueError, match="cached must be probabilities, one for each of the 400"):
        cache_weights.fit_weights(model, cache[1:], longest)
