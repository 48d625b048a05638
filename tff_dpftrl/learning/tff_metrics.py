"""The sums of `metric_sums` as TFF's learning processes and evaluations take them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_federated as tff

from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import metric_sums


def aggregator(build: metric_sums.Build) -> Callable[..., tff_names.Computation]:
    """Makes the `metrics_aggregator` of a learning process of sums, such as `metric_sums.build`."""

    def build_aggregation(metric_finalizers: Any, local_unfinalized_metrics_type: Any = None):
        del local_unfinalized_metrics_type  # The computation is polymorphic.
        finalize = metric_finalizers
        if not callable(finalize):  # TFF has a dictionary of functions for variable models.
            finalize = functools.partial(_finalized, metric_finalizers)

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

    Its results are the metrics of the current round, and nothing in place of those of all rounds.
    """
    aggregate = aggregator(build)(metric_finalizers)

    @tff_names.federated_computation
    def initialize():
        return tff_names.federated_value((), tff_names.SERVER)

    @tff_names.federated_computation(
        initialize.type_signature.result, tff_names.FederatedType(metrics_type, tff_names.CLIENTS)
    )
    def next_fn(state, unfinalized):
        result = tff_names.federated_zip((aggregate(unfinalized), state))
        return tff.templates.MeasuredProcessOutput(state, result, measurements=state)

    return tff.templates.AggregationProcess(initialize, next_fn)


def _finalized(finalizers: Any, sums: Any) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict((name, one(sums[name])) for name, one in finalizers.items())


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
