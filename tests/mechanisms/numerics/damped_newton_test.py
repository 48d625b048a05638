"""Tests of the batched Newton minimiser on functions with known minima."""

import numpy as np
import pytest

from tff_dpftrl.mechanisms.numerics import damped_newton


def _rosenbrock(points):
    x, y = points.T
    value = (1 - x) ** 2 + 100 * (y - x**2) ** 2
    gradient = np.stack([-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)], axis=1)
    return value, gradient


def test_finds_the_bottom_of_a_curved_valley():
    starts = np.array([[-1.2, 1.0], [2.0, 2.0], [0.0, -1.5]])
    points, values = damped_newton.minimize(
        _rosenbrock, starts, limit=3.0, tolerance=1e-14, max_iterations=200
    )
    best = np.argmin(values)
    np.testing.assert_allclose(points[best], [1, 1], atol=1e-5)
    assert values[best] < 1e-11


def test_leaves_a_saddle_point():
    def saddle(points):
        x, y = points.T
        return x**2 + y**4 / 4 - y**2 / 2, np.stack([2 * x, y**3 - y], axis=1)

    points, values = damped_newton.minimize(saddle, np.array([[0.5, 1e-3]]), limit=3.0)
    np.testing.assert_allclose(points[0], [0, 1], atol=1e-4)
    assert values[0] == pytest.approx(-0.25, abs=1e-8)


def test_stays_within_the_limit():
    def downhill(points):
        return -points[:, 0], np.full(points.shape, -1.0)

    points, _ = damped_newton.minimize(downhill, np.zeros((2, 1)), limit=1.5)
    np.testing.assert_array_equal(points, [[1.5], [1.5]])


def test_a_start_without_a_value_is_left_alone():
    def root(points):
        with np.errstate(invalid="ignore"):
            x = points[:, 0]
            return np.sqrt(x) + 1 / x, (0.5 / np.sqrt(x) - x**-2.0)[:, np.newaxis]

    points, values = damped_newton.minimize(root, np.array([[-1.0], [1.0]]), limit=10.0)
    assert values[0] == np.inf and points[0, 0] == -1.0
    assert points[1, 0] == pytest.approx(4 ** (1 / 3), abs=1e-4)
