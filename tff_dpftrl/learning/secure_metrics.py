"""Metrics of clients through secure sums, so that the server sees no single client's metrics.

They replace `tff.learning.metrics.sum_then_finalize`, which sums metrics in the clear. TFF's
`secure_sum_then_finalize` clips to [0, 2²⁰), where it has 32 bits, and adds other measurements.
Here all metrics are counts and losses that fit a fixed grid, and only they are sent.
"""

from __future__ import annotations

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import tff_names

FRACTION_BITS = 20
"""Number of fraction bits: floating-point numbers are rounded to multiples of 2⁻²⁰."""
LARGEST_ENTRY = 2**40 - 1
"""Largest integer that one client sends, so that a sum of up to 2²² clients is an int64."""


class SecureMetricsSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of exact secure sums of metrics that are not negative.

    A client's floating-point number is rounded to a multiple of 2⁻²⁰, up to 2²⁰; an integer is
    sent unchanged, up to 2⁴⁰ - 1. Larger values count as the limit, negative ones as 0. A client
    with a metric that is not finite, because its training diverged, counts as zero in all.
    """

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process, without state or measurements.

        Args:
          value_type: Type of a client's metrics, any nesting of integers and floating-point
            numbers of fixed shapes.

        Returns:
          The process; the sum has the same type.
        """
        structure = tff_names.type_to_tf_tensor_specs(value_type)
        dtypes = [spec.dtype for spec in tf.nest.flatten(structure)]

        @tff_names.tensorflow_computation(value_type)
        def encode(metrics):
            numbers = tf.nest.flatten(metrics)
            is_finite = tf.reduce_all([tf.reduce_all(_is_finite(number)) for number in numbers])
            encoded = [
                tf.where(is_finite, _encoded(n), tf.zeros_like(n, tf.int64)) for n in numbers
            ]
            return tf.nest.pack_sequence_as(structure, encoded)

        @tff_names.tensorflow_computation(encode.type_signature.result)
        def decode(sums):
            numbers = map(_decoded, tf.nest.flatten(sums), dtypes)
            return tf.nest.pack_sequence_as(structure, list(numbers))

        @tff_names.federated_computation
        def initialize():
            return tff_names.federated_value((), tff_names.SERVER)

        @tff_names.federated_computation(
            initialize.type_signature.result, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            total = tff_names.federated_secure_sum(
                tff_names.federated_map(encode, value), LARGEST_ENTRY
            )
            return tff.templates.MeasuredProcessOutput(
                state=state,
                result=tff_names.federated_map(decode, total),
                measurements=tff_names.federated_value((), tff_names.SERVER),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def secure_sum_then_finalize(
    metric_finalizers: Any, local_unfinalized_metrics_type: Any = None
) -> tff_names.Computation:
    """Builds secure metrics, as the `metrics_aggregator` of a learning process.

    Args:
      metric_finalizers: Function from summed metrics to final ones, or an ordered dictionary
        with a function for each metric.
      local_unfinalized_metrics_type: Ignored, because the computation is polymorphic.

    Returns:
      A computation from metrics at clients, of a type that `SecureMetricsSumFactory` takes, to
      metrics at the server.
    """
    del local_unfinalized_metrics_type

    def finalize(sums):
        if callable(metric_finalizers):
            return metric_finalizers(sums)
        return collections.OrderedDict(
            (name, finalizer(sums[name])) for name, finalizer in metric_finalizers.items()
        )

    @tff_names.federated_computation
    def aggregate(metrics):
        metrics_type = metrics.type_signature.member
        summed = SecureMetricsSumFactory().create(metrics_type)
        sums = summed.next(summed.initialize(), metrics).result
        return tff_names.federated_map(
            tff_names.tensorflow_computation(finalize, metrics_type), sums
        )

    return aggregate


def build_evaluation_process(
    finalizers: Any, metrics_type: tff_names.Type, *, is_secure: bool = True
) -> tff.templates.AggregationProcess:
    """Builds the `metrics_aggregation_process` of an evaluation.

    Args:
      finalizers: Functions from sums of metrics to final metrics, as for `sum_then_finalize`.
      metrics_type: Type of a client's metrics, one that `SecureMetricsSumFactory` takes.
      is_secure: Whether metrics are summed by secure sums.

    Returns:
      A process for `tff.learning.algorithms.build_fed_eval`.
    """
    factory = tff.learning.metrics.SumThenFinalizeFactory(
        finalizers, inner_summation_factory=SecureMetricsSumFactory() if is_secure else None
    )
    return factory.create(metrics_type)


def _is_finite(number: tf.Tensor) -> tf.Tensor:
    return tf.math.is_finite(number) if number.dtype.is_floating else tf.constant(True)


def _encoded(number: tf.Tensor) -> tf.Tensor:
    if number.dtype.is_floating:
        number = tf.round(tf.cast(number, tf.float64) * 2.0**FRACTION_BITS)
        number = tf.clip_by_value(number, 0.0, float(LARGEST_ENTRY))
    return tf.clip_by_value(tf.cast(number, tf.int64), 0, LARGEST_ENTRY)


def _decoded(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_floating:
        return tf.cast(tf.cast(total, tf.float64) / 2.0**FRACTION_BITS, dtype)
    return tf.cast(total, dtype)
