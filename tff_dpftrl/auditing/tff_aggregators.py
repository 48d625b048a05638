"""Aggregators of TFF, for audits to play with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import execution, validation
from tff_dpftrl.aggregators import updates
from tff_dpftrl.auditing import playing
from tff_dpftrl.execution import compiled_process, leaves, tff_names
from tff_dpftrl.execution import entropy as entropy_lib


def check(aggregator: Any) -> None:
    """Raises UsageError for what is neither a factory of TFF nor an aggregation process."""
    kinds = (
        tff.aggregators.UnweightedAggregationFactory,
        tff.aggregators.WeightedAggregationFactory,
        tff.templates.AggregationProcess,
    )
    if not isinstance(aggregator, kinds):
        raise validation.UsageError(
            "aggregator_or_process must be an Aggregation, a TFF aggregation factory or an "
            f"AggregationProcess, got {type(aggregator).__name__}."
        )


def is_process(aggregator: Any) -> bool:
    """Returns whether an aggregator is a process, which has a type of updates already."""
    return isinstance(aggregator, tff.templates.AggregationProcess)


def maker(aggregator: Any, value_type: Any) -> Callable[[], playing.Playable]:
    """Returns a function that makes a factory's process anew, or returns a process as it is."""
    if is_process(aggregator):
        return lambda: of_process(aggregator)
    value_type = type_of(value_type)
    if isinstance(aggregator, tff.aggregators.WeightedAggregationFactory):
        weight_type = tff_names.TensorType(np.float32)
        return lambda: of_process(aggregator.create(value_type, weight_type))
    return lambda: of_process(aggregator.create(value_type))


def type_of(value_type: Any) -> tff_names.Type:
    """Returns a type, or that of a list of float32 tensors of these shapes."""
    if isinstance(value_type, tff_names.Type):
        return value_type
    return tff_names.to_type([tff_names.TensorType(np.float32, list(one)) for one in value_type])


def of_process(process: tff.templates.AggregationProcess) -> playing.Playable:
    """Returns an aggregation process whose updates are floats of static shapes."""
    value_type, *weight_types = map(leaves.member, list(process.next.type_signature.parameter)[1:])
    update = updates.UpdateType(value_type)
    weight_type = weight_types[0] if weight_types else None
    if weight_type is not None and not isinstance(weight_type, tff_names.TensorType):
        raise validation.UsageError(
            f"aggregator must take a number as a client's weight, got {weight_type}."
        )
    weight_dtype = None if weight_type is None else tf.as_dtype(weight_type.dtype)
    joined = _of_one_argument(process, value_type, weight_type)

    def compiled(
        value: Any,
        spec: tf.TensorSpec,
        clients: execution.ClientRunner,
        entropy: entropy_lib.Repeated,
    ) -> Any:
        try:
            made = compiled_process.of_process(
                joined, dataset_fn=value, tensor_spec=spec, clients=clients, entropy=entropy
            )
        except execution.NotCompilableError:
            return joined, False
        return made, True

    def pack(tensors: Sequence[tf.Tensor]) -> Any:
        return update.pack_as_update(tensors)

    return playing.Playable(update.specs, pack, weight_dtype, compiled)


def _of_one_argument(
    process: tff.templates.AggregationProcess,
    value_type: tff_names.Type,
    weight_type: tff_names.Type | None,
) -> tff.templates.IterativeProcess:
    """Returns the process with one argument a client and two results, which can be compiled."""
    state_type = process.next.type_signature.parameter[0]
    if weight_type is None:

        @tff_names.federated_computation(
            state_type, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            output = process.next(state, value)
            return output.state, tff_names.federated_zip((output.result, output.measurements))

    else:
        pair_type = tff_names.FederatedType(
            tff_names.StructType([value_type, weight_type]), tff_names.CLIENTS
        )

        @tff_names.federated_computation(state_type, pair_type)
        def next_fn(state, pair):
            output = process.next(state, pair[0], pair[1])
            return output.state, tff_names.federated_zip((output.result, output.measurements))

    return tff.templates.IterativeProcess(process.initialize, next_fn)
