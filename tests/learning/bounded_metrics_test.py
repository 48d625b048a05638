"""Sums of metrics in which no client counts for more than a norm of 1."""

import collections
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import execution, validation
from tff_dpftrl.learning import bounded_metrics

_TYPE = tff.types.to_type(
    collections.OrderedDict(
        counts=collections.OrderedDict(total=np.float32, num=np.int64), sequences=np.int64
    )
)
_BOUNDS = {"total": 20.0, "num": 5.0}


def _finalize(sums):
    return collections.OrderedDict(num=sums["counts"]["num"], sequences=sums["sequences"])


def _client(total, num):
    counts = collections.OrderedDict(total=np.float32(total), num=np.int64(num))
    return collections.OrderedDict(counts=counts, sequences=np.int64(1))


def _aggregated(clients, bounds=None):
    summing = tff.learning.metrics.sum_then_finalize
    build = bounded_metrics.with_bounded_sums(summing, bounds or _BOUNDS)
    aggregate = build(_finalize, _TYPE)

    @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
    def run(metrics):
        return aggregate(metrics)

    with execution.local():
        return run(clients)


def test_each_client_is_scaled_and_clipped_and_its_mean_stays():
    few, many = _client(4.0, 2), _client(400.0, 100)
    broken = [_client(np.inf, 3), _client(np.nan, 3)]
    found = _aggregated([few, many, *broken])
    assert (found["num"], found["sequences"]) == (108, 4)  # As before.
    short, long = np.array([0.2, 0.4]), np.array([20.0, 20.0])
    expected = short + long / np.linalg.norm(long)
    np.testing.assert_allclose(found["bounded_sums"], expected, rtol=1e-8)
    assert found["bounded_sums"].dtype == np.float64


def test_nobody_changes_the_sums_by_more_than_the_norm():
    rng = np.random.default_rng(3)
    clip = tf.function(lambda row: bounded_metrics.clipped(tf.unstack(row), [1.0] * 3))
    for _ in range(300):
        values = 10.0 ** rng.uniform(-8, 30, size=3) * rng.choice([-1, 1], size=3)
        assert np.linalg.norm(clip(tf.constant(values)).numpy()) <= 1.0
    huge = [tf.constant(1e308, tf.float64)] * 2  # Their norm overflows.
    np.testing.assert_array_equal(bounded_metrics.clipped(huge, [1e-3, 1.0]), [0.0, 0.0])


def test_a_metric_without_a_sum_or_a_bound_is_refused_in_a_line():
    for bounds in ({"mean": 1.0}, {"total": np.inf}, {"num": 0.0}):
        with pytest.raises(validation.UsageError, match="bounds must be positive, of sums among"):
            _aggregated([_client(1.0, 1)], bounds)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
