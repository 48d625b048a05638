"""A TFF process taken apart into the TensorFlow graphs of its clients and its server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import (
    client_part,
    federated_round,
    graph_function,
    large_constants,
    large_fills,
    leaves,
    tff_names,
)

_ACCESSES = ("get_model_weights", "set_model_weights", "get_hparams", "set_hparams")
"""Computations of a learning process beside its rounds."""


def round_of(process: tff.templates.IterativeProcess) -> federated_round.FederatedRound:
    """Takes a process apart, which takes one to two seconds.

    One that TFF cannot take apart is refused (`graph_function.UnsupportedGraphError`).
    """
    signature = process.next.type_signature
    with _reporting_as_unsupported():
        _, second, *others = [one for _, one in tff_names.iter_elements(signature.result)]
        if not others and not isinstance(second, tff_names.FederatedType):
            raise graph_function.UnsupportedGraphError(
                f"the second result of next is {second}: make one value of the server of it, "
                "with tff.federated_zip."
            )
        form = tff_names.get_map_reduce_form_for_computation(process.next, _config())
    (state_name, state_type), (output_name, output_type) = [
        (name, leaves.member(one)) for name, one in tff_names.iter_elements(signature.result)
    ]
    container = signature.result.python_container or tuple

    def result(state: Any, output: Any) -> Any:
        if state_name is None:
            return container([state, output])
        return container(**{state_name: state, output_name: output})

    work = form.work.type_signature.result
    # Large constants, such as a model's initial weights, are no part of the graph that runs here.
    small, constants = large_constants.take_out(process.initialize)
    graph, values = _graph_and_values(_merged(small), constants)
    initialize = client_part.local(graph)
    return federated_round.FederatedRound(
        state=leaves.TffStructure(state_type),
        client=leaves.TffStructure(leaves.member(signature.parameter[1])),
        broadcast=leaves.TffStructure(form.prepare.type_signature.result),
        report=leaves.TffStructure(work),
        output=leaves.TffStructure(output_type),
        secure_sums=tuple(_secure_sums(form, *list(work)[1:])),
        initialize=lambda: initialize(*values),
        initialize_in_graph=lambda: graph_of(_merged(process.initialize)).importer(
            edit=large_fills.compute
        )(),
        prepare=graph_of(form.prepare),
        work=graph_of(form.work),
        zero=graph_of(form.zero),
        accumulate=graph_of(form.accumulate),
        merge=graph_of(form.merge),
        closing=graph_of(form.report),
        update=graph_of(form.update),
        accesses={
            name: _access(name, getattr(process, name))
            for name in _ACCESSES
            if _is_graph(getattr(process, name, None))
        },
        result=result,
    )


def _secure_sums(
    form: tff_names.MapReduceForm,
    by_bits: tff_names.Type,
    by_input: tff_names.Type,
    by_modulus: tff_names.Type,
) -> Iterator[federated_round.SecureSum]:
    """Yields the secure sums of a form, in the order of a report's tensors."""
    made = federated_round.SecureSum
    for spec, bits in _limited(form.secure_sum_bitwidth, by_bits):
        yield made(spec, largest_entry=2**bits - 1)
    for spec, largest in _limited(form.secure_sum_max_input, by_input):
        yield made(spec, largest_entry=largest)
    for spec, modulus in _limited(form.secure_modular_sum_modulus, by_modulus):
        yield made(spec, modulus=modulus)


def _is_graph(computation: Any) -> bool:
    """Returns whether something is a computation of TensorFlow, of one place."""
    if not isinstance(computation, tff_names.Computation):
        return False
    message = tff_names.ConcreteComputation.get_proto(computation)
    return message.WhichOneof("computation") == "tensorflow"


def _access(name: str, computation: tff_names.Computation) -> federated_round.Access:
    """Returns a computation of a state; one that sets something has a second argument."""
    signature = computation.type_signature
    parameters = list(signature.parameter) if name.startswith("set_") else [signature.parameter]
    return federated_round.Access(
        graph_of(computation),
        tuple(map(leaves.TffStructure, parameters)),
        leaves.TffStructure(signature.result),
    )


def _config() -> tf.compat.v1.ConfigProto:
    """Returns TFF's options for graphs, without Grappler.

    Grappler would lower loops to a form that cannot be called in a `tf.function`.
    """
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def _merged(initialize: tff_names.Computation) -> tff_names.Computation:
    with _reporting_as_unsupported():
        return tff_names.get_state_initialization_computation(initialize, _config())


@contextlib.contextmanager
def _reporting_as_unsupported() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise graph_function.UnsupportedGraphError(f"TFF reports: {error}") from error


def _limited(
    computation: tff_names.Computation, summed: tff_names.Type
) -> Iterator[tuple[tf.TensorSpec, int]]:
    """Runs a computation without arguments; yields its value for each leaf of a secure sum."""
    values = [int(value) for value in client_part.local(graph_of(computation))()]
    places = leaves.spread(computation.type_signature.result, summed)
    yield from zip(leaves.specs(summed), (values[i] for i in places), strict=True)


def graph_of(computation: tff_names.Computation) -> graph_function.GraphFunction:
    """Returns a TensorFlow computation's graph; refuses others (`UnsupportedGraphError`)."""
    return _graph_and_values(computation, [])[0]


def _graph_and_values(
    computation: tff_names.Computation, constants: Sequence[tf.Tensor]
) -> tuple[graph_function.GraphFunction, list[tf.Tensor]]:
    """Returns a graph whose last inputs are constants that were taken out, and their values."""
    message = tff_names.ConcreteComputation.get_proto(computation)
    kind = message.WhichOneof("computation")
    if kind != "tensorflow":
        raise graph_function.UnsupportedGraphError(
            f"a part of it is not a TensorFlow graph but a {kind}."
        )
    content = message.tensorflow
    graph = tf.compat.v1.GraphDef()
    content.graph_def.Unpack(graph)
    inputs = tensor_names(content.parameter) if content.HasField("parameter") else []
    outputs = tensor_names(content.result)
    initialize_ops = [content.initialize_op] if content.initialize_op else []
    graph_function.prune(graph, [*inputs, *outputs, *initialize_ops])
    stand_ins = large_constants.placeholders(graph, constants)
    values = [value for _, value in stand_ins]
    specs = [*leaves.specs(computation.type_signature.parameter)]
    made = graph_function.GraphFunction(
        graph.SerializeToString(),
        (*inputs, *(name for name, _ in stand_ins)),
        tuple(outputs),
        (*specs, *(tf.TensorSpec(value.shape, value.dtype) for value in values)),
        content.initialize_op,
    )
    return made, values


def tensor_names(binding: Any) -> list[str]:
    """Returns the names of a value's leaves in the graph, from TFF's binding of the value."""
    match binding.WhichOneof("binding"):
        case "struct":
            return [name for element in binding.struct.element for name in tensor_names(element)]
        case "tensor":
            return [binding.tensor.tensor_name]
        case "sequence":
            return [binding.sequence.variant_tensor_name]
        case other:
            raise graph_function.UnsupportedGraphError(f"a part of it has a value that is {other}.")
