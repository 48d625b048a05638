import math
import sys

import numpy as np
import pytest

from tff_dpftrl.runtime.status import distribution


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_quantiles_are_off_by_half_a_bucket_at_most(fraction):
    values = np.random.default_rng(0).lognormal(3, 1.5, 20_000)
    kept = distribution.Distribution(0.125, 2**20)
    for value in values:
        kept.add(value)
    exact = np.quantile(values, fraction)
    assert abs(math.log2(kept.quantile(fraction) / exact)) < 1 / 8
    assert kept.count == 20_000
    assert kept.sum == pytest.approx(values.sum())


def test_what_lies_outside_counts_at_the_ends():
    kept = distribution.Distribution(1, 8)
    for value in (0.0, -3.0, 1e9):
        kept.add(value)
    assert (kept.counts[0], kept.counts[-1]) == (2, 1)
    assert kept.quantile(0.1) == 1
    assert kept.quantile(1.0) == 8


def test_what_is_not_finite_is_left_out():
    kept = distribution.Distribution(1, 8)
    kept.add(math.nan)
    kept.add(math.inf)
    assert kept.count == 0
    assert kept.quantile(0.5) is None


def test_octaves_count_what_is_at_most_so_large():
    kept = distribution.Distribution(1, 8)
    for value in (0.5, 1, 1.1, 2, 2.1, 8, 9):
        kept.add(value)
    assert kept.octaves() == [(1, 2), (2, 4), (4, 5), (8, 6)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
