"""Histograms of clients' metrics, for order statistics, summed beside the metrics themselves.

Each client computes its own final metrics, such as its mean loss, and sends a one-hot vector for
each that has a grid. A client whose metrics are all zero has no examples, or its training diverged:
it has no value.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names
from tff_dpftrl.models import metric_grid

Grids = Mapping[str, metric_grid.MetricGrid]
"""Grids by the names of final metrics. `metric_grid.SECONDS` has no values here: whoever runs the
client's graph fills its histogram in, as devices do."""


def with_histograms(
    metrics_aggregator: Callable[..., tff_names.Computation], grids: Grids, *, is_secure: bool
) -> Callable[..., tff_names.Computation]:
    """Adds histograms to the metrics of training.

    Args:
      metrics_aggregator: Function that builds the aggregation of the metrics, such as
        `tff.learning.metrics.sum_then_finalize`.
      grids: Grids by the names of final metrics.
      is_secure: Whether histograms are summed by secure sums.

    Returns:
      A function like `metrics_aggregator`, whose metrics have one more entry, int32 of shape
      [size], for each grid: that of "loss" has the name "loss_histogram".
    """

    def build(metric_finalizers: Any, local_unfinalized_metrics_type: Any = None):
        inner = metrics_aggregator(metric_finalizers, local_unfinalized_metrics_type)

        @tff_names.federated_computation
        def aggregate(metrics):
            return _joined(inner(metrics), _summed(metrics, metric_finalizers, grids, is_secure))

        return aggregate

    return build


def evaluation_with_histograms(
    process: tff.templates.AggregationProcess,
    metric_finalizers: Any,
    grids: Grids,
    *,
    is_secure: bool,
) -> tff.templates.AggregationProcess:
    """Adds histograms to the metrics of an evaluation.

    Args:
      process: Aggregation of the metrics, for `tff.learning.algorithms.build_fed_eval`.
      metric_finalizers: Function from unfinalized to final metrics, or a dictionary of functions.
      grids: Grids by the names of final metrics.
      is_secure: Whether histograms are summed by secure sums.

    Returns:
      A process like `process`; the histograms are among the metrics of the current round.
    """

    @tff_names.federated_computation(*process.next.type_signature.parameter)
    def next_fn(state, metrics):
        output = process.next(state, metrics)
        this_round, all_rounds = output.result
        joined = _joined(this_round, _summed(metrics, metric_finalizers, grids, is_secure))
        return tff.templates.MeasuredProcessOutput(
            output.state, tff_names.federated_zip((joined, all_rounds)), output.measurements
        )

    return tff.templates.AggregationProcess(process.initialize, next_fn)


def _summed(metrics: Any, finalizers: Any, grids: Grids, is_secure: bool) -> Any:
    """Sums the one-hot vectors of all clients, a federated value at the server."""
    metrics_type = metrics.type_signature.member

    @tff_names.tensorflow_computation(metrics_type)
    def encode(unfinalized):
        numbers = tf.nest.flatten(unfinalized)
        has_values = tf.reduce_any([tf.math.count_nonzero(number) > 0 for number in numbers])
        final = _finalized(finalizers, unfinalized)
        unknown = sorted(set(grids) - set(final) - {metric_grid.SECONDS})
        if unknown:
            raise validation.UsageError(
                f"grids names {unknown}, and the model has the metrics {sorted(final)}."
            )
        return collections.OrderedDict(
            (name + metric_grid.SUFFIX, _one_hot(grid, final.get(name), has_values))
            for name, grid in grids.items()
        )

    histograms = tff_names.federated_map(encode, metrics)
    if is_secure:
        return tff_names.federated_secure_sum(histograms, 1)
    return tff_names.federated_sum(histograms)


def _joined(metrics: Any, histograms: Any) -> Any:
    pair = tff_names.federated_zip((metrics, histograms))

    @tff_names.tensorflow_computation(pair.type_signature.member)
    def join(one, other):
        return collections.OrderedDict([*one.items(), *other.items()])

    return tff_names.federated_map(join, pair)


def _finalized(finalizers: Any, unfinalized: Any) -> Mapping[str, Any]:
    if callable(finalizers):
        return finalizers(unfinalized)
    return {name: finalize(unfinalized[name]) for name, finalize in finalizers.items()}


def _one_hot(
    grid: metric_grid.MetricGrid, value: tf.Tensor | None, has_values: tf.Tensor
) -> tf.Tensor:
    """Returns the vector of a client's value; a float32 is compared exactly, as float64."""
    if value is None:
        return tf.one_hot(0, grid.size, dtype=tf.int32)
    if value.shape.rank != 0:
        raise validation.UsageError(
            f"A metric with a grid must be a scalar, got shape {value.shape}."
        )
    value = tf.cast(value, tf.float64)
    inner = tf.constant(grid.edges[1:-1], tf.float64)
    place = 1 + tf.reduce_sum(tf.cast(value >= inner, tf.int32))
    is_known = tf.logical_and(has_values, tf.math.is_finite(value))
    return tf.one_hot(tf.where(is_known, place, 0), grid.size, dtype=tf.int32)
