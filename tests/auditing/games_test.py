import sys

import numpy as np
import pytest

from tff_dpftrl.auditing import games


@pytest.mark.parametrize("sizes", [[40, 60], [1, 30], [5]])
def test_canaries_are_unit_directions_without_a_common_coordinate(sizes):
    canaries = games.Canaries.over(sizes, at_most=10, seed=0)
    directions = np.stack([canaries.of(canary) for canary in range(canaries.number)])
    np.testing.assert_allclose(directions @ directions.T, np.eye(canaries.number), atol=1e-12)
    assert np.all(directions[:, canaries.quiet] == 0.0)


def test_a_small_tensor_has_room_for_some_canaries_only():
    canaries = games.Canaries.over([3, 40], at_most=10, seed=0)
    touched = [np.any(canaries.of(canary)[:3]) for canary in range(10)]
    assert canaries.number == 10 and sum(touched) == 3


def test_large_tensors_are_touched_by_all_canaries_and_keep_a_quiet_fifth():
    canaries = games.Canaries.over([40, 60], at_most=10, seed=0)
    for canary in range(10):
        direction = canaries.of(canary)
        assert np.any(direction[:40]) and np.any(direction[40:])
    assert len(canaries.quiet) >= 20


def test_projections_are_scalar_products():
    canaries = games.Canaries.over([20, 20], at_most=7, seed=3)
    released = np.random.default_rng(0).normal(size=40)
    expected = [canaries.of(canary) @ released for canary in range(canaries.number)]
    np.testing.assert_allclose(canaries.projections(released), expected, atol=1e-12)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
