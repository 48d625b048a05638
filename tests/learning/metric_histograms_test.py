"""Histograms of clients' metrics, in the clear and by secure sums."""

import collections
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.learning import metric_histograms, secure_metrics
from tff_dpftrl.models import metric_grid

_TYPE = tff.types.to_type(collections.OrderedDict(total=np.float32, num=np.int64))
_GRIDS = {
    "mean": metric_grid.MetricGrid.linear(0.0, 1.0, 5),
    "num": metric_grid.MetricGrid((0.0, 1.0, 10.0)),
    "seconds": metric_grid.MetricGrid((0.0, 1.0)),
}


def _finalize(sums):
    mean = sums["total"] / tf.cast(sums["num"], tf.float32)
    return collections.OrderedDict(mean=mean, num=sums["num"])


def _clients(*pairs):
    return [
        collections.OrderedDict(total=np.float32(total), num=np.int64(num)) for total, num in pairs
    ]


@pytest.mark.parametrize("is_secure", [False, True])
def test_each_client_counts_once_in_the_bucket_of_its_own_value(is_secure):
    summing = tff.learning.metrics.sum_then_finalize
    if is_secure:
        summing = secure_metrics.secure_sum_then_finalize
    build = metric_histograms.with_histograms(summing, _GRIDS, is_secure=is_secure)
    aggregate = build(_finalize, _TYPE)

    @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
    def run(metrics):
        return aggregate(metrics)

    clients = _clients((0.1, 1), (1.9, 2), (8.5, 10), (0, 3), (0, 0), (5, 0))
    with execution.secure_sum_simulation():
        found = run(clients)
    assert list(found) == ["mean", "num", *(f"{name}_histogram" for name in _GRIDS)]
    assert found["num"] == 16
    # Means 0.1, 0.95, 0.85, 0; one client without examples, and one whose mean is infinite.
    assert found["mean_histogram"].tolist() == [2, 2, 0, 0, 0, 2]
    # Of the last client, the number 0 is a value.
    assert found["num_histogram"].tolist() == [1, 1, 4]
    assert found["seconds_histogram"].tolist() == [6, 0]  # For whoever runs the client's graph.
    message = str(tff.framework.ConcreteComputation.get_proto(run))
    assert ("federated_secure_sum" in message) is is_secure
    assert ("federated_sum" in message or "federated_aggregate" in message) is not is_secure


def test_the_graph_counts_as_the_grid_does():
    grid = metric_grid.MetricGrid.logarithmic(2.0**-6, 100.0, per_octave=16)
    edges = np.array(grid.edges)
    values = [*edges, *np.nextafter(edges, -1), -1.0, 1e9, np.nan, np.inf, -np.inf]
    for value in values:
        counts = metric_histograms._one_hot(grid, tf.constant(value, tf.float64), tf.constant(True))
        assert np.argmax(counts) == grid.place(value) and sum(counts.numpy()) == 1


def test_a_metric_with_a_grid_must_be_a_scalar():
    def pair(sums):
        return collections.OrderedDict(mean=tf.stack([sums["total"], sums["total"]]))

    build = metric_histograms.with_histograms(
        tff.learning.metrics.sum_then_finalize,
        {"mean": metric_grid.MetricGrid((0.0, 1.0))},
        is_secure=False,
    )
    aggregate = build(pair, _TYPE)
    with pytest.raises(ValueError, match=r"with a grid must be a scalar, got shape \(2,\)"):

        @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
        def _(metrics):
            return aggregate(metrics)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
