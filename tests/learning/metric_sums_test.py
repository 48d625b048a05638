"""Sums of clients' metrics: in the clear, secure, bounded and as histograms."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import metric_sums
from tff_dpftrl.models import metric_grid

_SPEC = collections.OrderedDict(
    counts=collections.OrderedDict(
        zeta=tf.TensorSpec([], tf.float32), alpha=tf.TensorSpec([], tf.int64)
    ),
    num=tf.TensorSpec([2], tf.int32),
)
_GRIDS = {
    "mean": metric_grid.MetricGrid.linear(0.0, 1.0, 5),
    "num": metric_grid.MetricGrid((0.0, 1.0, 10.0)),
    "seconds": metric_grid.MetricGrid((0.0, 1.0)),
}


def _client(loss, count, num=(1, 1)):
    return collections.OrderedDict(
        counts=collections.OrderedDict(
            zeta=tf.constant(loss, tf.float32), alpha=tf.constant(count, tf.int64)
        ),
        num=tf.constant(num, tf.int32),
    )


def _final(sums):
    counts = sums["counts"]
    mean = counts["zeta"] / tf.cast(counts["alpha"], tf.float32)
    return collections.OrderedDict(mean=mean, num=counts["alpha"])


def _metrics(part, *clients):
    return part.decode(tf.nest.map_structure(lambda *n: tf.add_n(n), *map(part.encode, clients)))


def _secure(*clients):
    return _metrics(metric_sums.secure(lambda sums: sums, _SPEC), *clients)


def test_sums_in_the_clear_are_finalized():
    part = metric_sums.in_the_clear(_final)
    assert part.largest is None
    assert _metrics(part, _client(1.0, 2), _client(2.0, 4)) == {"mean": 0.5, "num": 6}


def test_secure_sums_are_those_of_the_grid_and_keep_names_and_dtypes():
    total = _secure(_client(1.5, 3, [1, 0]), _client(2 + 2.0**-20, 4, [5, 6]))
    assert total["counts"]["zeta"] == np.float32(3.5 + 2.0**-20)
    assert total["counts"]["alpha"] == 7
    assert total["num"].numpy().tolist() == [6, 6]
    dtypes = tf.nest.map_structure(lambda number: number.dtype, total)
    assert dtypes == tf.nest.map_structure(lambda spec: spec.dtype, _SPEC)


def test_a_client_whose_training_diverged_counts_as_nobody():
    broken = [_client(loss, 100, [100, 100]) for loss in (np.nan, np.inf, -np.inf)]
    total = _secure(*broken[:2], _client(1.5, 3, [1, 2]), *broken[2:])
    assert total["counts"] == {"zeta": 1.5, "alpha": 3}
    assert total["num"].numpy().tolist() == [1, 2]


def test_a_client_adds_no_more_than_a_secure_sum_has_room_for():
    total = _secure(_client(1e30, 2**62, [1, 1]), _client(-5.0, -5, [-1, 1]))
    assert total["counts"]["zeta"] == np.float32(2**20)
    assert total["counts"]["alpha"] == metric_sums.LARGEST_ENTRY
    assert total["num"].numpy().tolist() == [1, 2]


def test_each_client_is_scaled_and_clipped_and_its_mean_stays():
    part = metric_sums.bounded({"zeta": 20.0, "alpha": 5.0})
    broken = [_client(np.inf, 3), _client(np.nan, 3)]
    found = _metrics(part, _client(4.0, 2), _client(400.0, 100), *broken)
    short, long = np.array([0.2, 0.4]), np.array([20.0, 20.0])
    expected = short + long / np.linalg.norm(long)
    assert list(found) == [metric_sums.BOUNDED_SUMS] and part.largest is None
    np.testing.assert_allclose(found["bounded_sums"], expected, rtol=1e-8)
    assert found["bounded_sums"].dtype == tf.float64


def test_nobody_changes_the_bounded_sums_by_more_than_the_norm():
    rng = np.random.default_rng(3)
    encode = metric_sums.bounded(dict.fromkeys("abc", 1.0)).encode
    clip = tf.function(lambda row: encode(dict(zip("abc", tf.unstack(row), strict=True))))
    for _ in range(300):
        values = 10.0 ** rng.uniform(-8, 30, size=3) * rng.choice([-1, 1], size=3)
        assert np.linalg.norm(clip(tf.constant(values)).numpy()) <= 1.0
    huge = dict.fromkeys("ab", tf.constant(1e308, tf.float64))  # Their norm overflows.
    encode = metric_sums.bounded({"a": 1e-3, "b": 1.0}).encode
    np.testing.assert_array_equal(encode(huge), [0.0, 0.0])


def test_a_metric_without_a_sum_or_a_bound_is_refused_in_a_line():
    for bounds in ({"mean": 1.0}, {"zeta": np.inf}, {"alpha": 0.0}):
        with pytest.raises(validation.UsageError, match="bounds must be positive, of sums among"):
            metric_sums.bounded(bounds).encode(_client(1.0, 1))


@pytest.mark.parametrize("is_secure", [False, True])
def test_each_client_counts_once_in_the_bucket_of_its_own_value(is_secure):
    part = metric_sums.histograms(_final, _GRIDS, is_secure)
    pairs = ((0.1, 1), (1.9, 2), (8.5, 10), (0, 3), (0, 0), (5, 0))
    found = _metrics(part, *(_client(*pair, [0, 0]) for pair in pairs))
    assert list(found) == [f"{name}_histogram" for name in _GRIDS]
    # Means 0.1, 0.95, 0.85, 0; one client without examples, and one whose mean is infinite.
    assert found["mean_histogram"].numpy().tolist() == [2, 2, 0, 0, 0, 2]
    # Of the last client, the number 0 is a value.
    assert found["num_histogram"].numpy().tolist() == [1, 1, 4]
    # For whoever runs the client's graph.
    assert found["seconds_histogram"].numpy().tolist() == [6, 0]
    assert part.largest == (1 if is_secure else None)


def test_the_graph_counts_as_the_grid_does():
    grid = metric_grid.MetricGrid.logarithmic(2.0**-6, 100.0, per_octave=16)
    edges = np.array(grid.edges)
    values = [*edges, *np.nextafter(edges, -1), -1.0, 1e9, np.nan, np.inf, -np.inf]
    for value in values:
        counts = metric_sums._one_hot(grid, tf.constant(value, tf.float64), tf.constant(True))
        assert np.argmax(counts) == grid.place(value) and sum(counts.numpy()) == 1


def test_grids_are_of_metrics_that_are_scalars():
    grid = metric_grid.MetricGrid((0.0, 1.0))
    with pytest.raises(validation.UsageError, match=r"with a grid must be a scalar, .*\(2,\)"):
        metric_sums.histograms(lambda sums: sums, {"num": grid}, False).encode(_client(1.0, 1))
    with pytest.raises(validation.UsageError, match=r"grids names \['loss'\], .* \['mean', 'num'"):
        metric_sums.histograms(_final, {"loss": grid}, False).encode(_client(1.0, 1))
