"""Metrics of clients through secure sums, so that the server sees no client's own.

In place of `tff.learning.metrics.sum_then_finalize`, which sums them in the clear. TFF's
`secure_sum_then_finalize` clips to [0, 2²⁰), where it has 32 bits, and adds measurements of its
own; here all metrics are counts and losses that a fixed grid has room for, and only they are sent.
"""

from __future__ import annotations

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

FRACTION_BITS = 20
"""Of floating-point numbers: they are rounded to multiples of 2⁻²⁰."""
LARGEST_ENTRY = 2**40 - 1
"""Of one client. A sum of up to 2²² clients stays an int64."""


class SecureMetricsSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """Sums metrics that are not negative by exact secure sums of integers.

    A client's floating-point number is rounded to a multiple of 2⁻²⁰, up to 2²⁰; an integer is
    sent as it is, up to 2⁴⁰ - 1. What is above counts as that, what is below 0 as 0. A client of
    whose metrics one is not finite, because its training diverged, counts as zero in all.
    """

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Creates the process, without state or measurements.

        Args:
          value_type: Any nesting of integers and floating-point numbers, of fixed shapes.

        Returns:
          The process; the sum has the same type.
        """
        structure = tff.types.type_to_tf_tensor_specs(value_type)
        dtypes = [spec.dtype for spec in tf.nest.flatten(structure)]

        @tff.tensorflow.computation(value_type)
        def encode(metrics):
            numbers = tf.nest.flatten(metrics)
            is_finite = tf.reduce_all([tf.reduce_all(_is_finite(number)) for number in numbers])
            encoded = [
                tf.where(is_finite, _encoded(n), tf.zeros_like(n, tf.int64)) for n in numbers
            ]
            return tf.nest.pack_sequence_as(structure, encoded)

        @tff.tensorflow.computation(encode.type_signature.result)
        def decode(sums):
            numbers = map(_decoded, tf.nest.flatten(sums), dtypes)
            return tf.nest.pack_sequence_as(structure, list(numbers))

        @tff.federated_computation
        def initialize():
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            total = tff.federated_secure_sum(tff.federated_map(encode, value), LARGEST_ENTRY)
            return tff.templates.MeasuredProcessOutput(
                state=state,
                result=tff.federated_map(decode, total),
                measurements=tff.federated_value((), tff.SERVER),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def secure_sum_then_finalize(
    metric_finalizers: Any, local_unfinalized_metrics_type: Any = None
) -> tff.Computation:
    """The `metrics_aggregator` of a learning process whose metrics are summed securely.

    Args:
      metric_finalizers: As `tff.learning.metrics.sum_then_finalize` takes them.
      local_unfinalized_metrics_type: Not needed: the computation is polymorphic.

    Returns:
      A computation from metrics at clients, as for `SecureMetricsSumFactory`, to metrics at the
      server.
    """
    del local_unfinalized_metrics_type

    def finalize(sums):
        if callable(metric_finalizers):
            return metric_finalizers(sums)
        return collections.OrderedDict(
            (name, finalizer(sums[name])) for name, finalizer in metric_finalizers.items()
        )

    @tff.federated_computation
    def aggregate(metrics):
        metrics_type = metrics.type_signature.member
        summed = SecureMetricsSumFactory().create(metrics_type)
        sums = summed.next(summed.initialize(), metrics).result
        return tff.federated_map(tff.tensorflow.computation(finalize, metrics_type), sums)

    return aggregate


def build_evaluation_process(
    model: tff.learning.models.FunctionalModel,
) -> tff.templates.AggregationProcess:
    """The `metrics_aggregation_process` of an evaluation whose metrics are summed securely.

    Args:
      model: The model; its metrics are as for `SecureMetricsSumFactory`.

    Returns:
      A process for `tff.learning.algorithms.build_fed_eval`.
    """
    with tf.Graph().as_default():
        specs = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
            model.initialize_metrics_state(),
        )
    factory = tff.learning.metrics.SumThenFinalizeFactory(
        model.finalize_metrics, inner_summation_factory=SecureMetricsSumFactory()
    )
    return factory.create(tff.types.tensorflow_to_type(specs))


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
