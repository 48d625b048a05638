"""The sums of `metric_sums` as TFF's learning processes and evaluations take them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import metric_sums


def aggregator(build: metric_sums.Build) -> Callable[..., tff_names.Computation]:
    """Makes the `metrics_aggregator` of a learning process.

    Args:
      build: Function that builds the sums, such as `metric_sums.build`, or for secure sums
        `functools.partial(metric_sums.build, is_secure=True)`.

    Returns:
      A function like `tff.learning.metrics.sum_then_finalize`.
    """

    def build_aggregation(metric_finalizers: Any, local_unfinalized_metrics_type: Any = None):
        del local_unfinalized_metrics_type  # The computation is polymorphic.
        finalize = _as_function(metric_finalizers)

        @tff_names.federated_computation
        def aggregate(metrics):
            spec = tff_names.type_to_tf_tensor_specs(metrics.type_signature.member)
            return _joined([_summed(part, metrics) for part in build(finalize, spec)])

        return aggregate

    return build_aggregation


def evaluation_process(
    build: metric_sums.Build, metric_finalizers: Any, metrics_type: tff_names.Type
) -> tff.templates.AggregationProcess:
    """Builds the `metrics_aggregation_process` of `tff.learning.algorithms.build_fed_eval`.

    Args:
      build: Function that builds the sums, such as `metric_sums.build`.
      metric_finalizers: Function from unfinalized to final metrics, or an ordered dictionary with
        a function for each metric.
      metrics_type: Type of a client's unfinalized metrics.

    Returns:
      The process, with the state and the results of
      `tff.learning.metrics.SumThenFinalizeFactory`: metrics of the current round, and of the sums
      of all rounds. Histograms are among those of the current round only.
    """
    finalize = _as_function(metric_finalizers)
    spec = tff_names.type_to_tf_tensor_specs(metrics_type)
    metrics, *_ = build(lambda sums: sums, spec)
    _, *others = build(finalize, spec)

    @tff_names.tensorflow_computation
    def zero():
        return tf.nest.map_structure(lambda one: tf.zeros(one.shape, one.dtype), spec)

    @tff_names.tensorflow_computation(metrics_type, metrics_type)
    def add(one, other):
        return tf.nest.map_structure(tf.add, one, other)

    final = tff_names.tensorflow_computation(finalize, metrics_type)

    @tff_names.federated_computation
    def initialize():
        nothing = tff_names.federated_value((), tff_names.SERVER)
        return tff_names.federated_zip((nothing, tff_names.federated_eval(zero, tff_names.SERVER)))

    @tff_names.federated_computation(
        initialize.type_signature.result, tff_names.FederatedType(metrics_type, tff_names.CLIENTS)
    )
    def next_fn(state, unfinalized):
        nothing, before = state
        sums = _summed(metrics, unfinalized)
        total = tff_names.federated_map(add, (before, sums))
        this_round = _joined(
            [
                tff_names.federated_map(final, sums),
                *(_summed(part, unfinalized) for part in others),
            ]
        )
        return tff.templates.MeasuredProcessOutput(
            state=tff_names.federated_zip((nothing, total)),
            result=tff_names.federated_zip((this_round, tff_names.federated_map(final, total))),
            measurements=tff_names.federated_value((), tff_names.SERVER),
        )

    return tff.templates.AggregationProcess(initialize, next_fn)


def _as_function(finalizers: Any) -> metric_sums.Finalize:
    """Returns finalizers as one function: TFF has a dictionary of them for variable models."""
    if callable(finalizers):
        return finalizers
    return lambda sums: collections.OrderedDict(
        (name, finalizer(sums[name])) for name, finalizer in finalizers.items()
    )


def _summed(part: metric_sums.MetricSum, metrics: Any) -> Any:
    """Returns the metrics of one sum, a federated value at the server."""
    encode = tff_names.tensorflow_computation(part.encode, metrics.type_signature.member)
    sent = tff_names.federated_map(encode, metrics)
    if part.largest is None:
        total = tff_names.federated_sum(sent)
    else:
        total = tff_names.federated_secure_sum(sent, part.largest)
    decode = tff_names.tensorflow_computation(part.decode, total.type_signature.member)
    return tff_names.federated_map(decode, total)


def _joined(metrics: Sequence[Any]) -> Any:
    """Joins dictionaries at the server to one."""
    parts = tff_names.federated_zip(tuple(metrics))

    @tff_names.tensorflow_computation(parts.type_signature.member)
    def join(dictionaries):
        return collections.OrderedDict(item for one in dictionaries for item in one.items())

    return tff_names.federated_map(join, parts)
