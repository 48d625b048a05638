"""Quantiles from histograms, against those of the sorted values."""

import math

import numpy as np
import pytest

from tff_dpftrl.models import metric_grid

_LOGARITHMIC = metric_grid.MetricGrid.logarithmic(2.0**-6, 100.0, per_octave=16)
_LINEAR = metric_grid.MetricGrid.linear(0.0, 1.0, 50)


def _histogram(grid, values):
    return np.bincount([grid.place(value) for value in values], minlength=grid.size)


@pytest.mark.parametrize("grid", [_LOGARITHMIC, _LINEAR])
@pytest.mark.parametrize("num_values", [1, 2, 3, 10, 101])
def test_a_quantile_is_an_order_statistic_up_to_the_resolution(grid, num_values):
    values = np.random.default_rng(num_values).uniform(0.0, grid.edges[-1], num_values)
    found = grid.quantiles(_histogram(grid, values))
    for name, fraction in metric_grid.QUANTILES.items():
        true = np.sort(values)[math.ceil(fraction * num_values) - 1]
        assert abs(found[name] - true) <= found["resolution"] * (1 + 1e-12)
    assert found["resolution"] < 0.03 * grid.edges[-1]  # Half a bucket.


def test_values_at_edges_and_beyond_the_grid():
    grid = metric_grid.MetricGrid((0.0, 1.0, 3.0))
    assert [grid.place(x) for x in (-5, 0, 0.99, 1, 3, 1e9)] == [1, 1, 1, 2, 2, 2]
    assert [grid.place(x) for x in (np.nan, np.inf, -np.inf)] == [0, 0, 0]
    assert _LOGARITHMIC.edges[:2] == (0.0, 2.0**-6) and _LOGARITHMIC.edges[-1] == 128


def test_clients_without_a_value_are_in_no_quantile():
    grid = metric_grid.MetricGrid((0.0, 1.0, 3.0))
    assert grid.quantiles(np.array([9, 0, 1])) == {
        "p10": 2.0, "median": 2.0, "p90": 2.0, "resolution": 1.0
    }  # fmt: skip
    assert set(grid.quantiles(np.array([9, 0, 0])).values()) == {None}


@pytest.mark.parametrize("edges", [(), (1.0,), (0, 0), (0, np.nan), (0, np.inf), range(2000)])
def test_edges_must_be_a_grid(edges):
    with pytest.raises(ValueError, match=r"edges must be 2 to 1001 finite numbers that increase"):
        metric_grid.MetricGrid(tuple(edges))
