"""A TFF process taken apart into the TensorFlow graphs of its clients and its server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import (
    client_part,
    draw_memory,
    graph_function,
    large_constants,
    large_fills,
    leaves,
    secure_noise,
    tff_names,
)


@dataclasses.dataclass(frozen=True)
class ProcessForm:
    """A process taken apart: its initialisation, and TFF's MapReduceForm of its round.

    Attributes:
      process_initialize: The process's own `initialize`.
      round: Computations of clients and server in a round.
    """

    process_initialize: tff_names.Computation
    round: tff_names.MapReduceForm

    @classmethod
    def of(cls, process: tff.templates.IterativeProcess) -> ProcessForm:
        """Takes a process apart, which takes one to two seconds.

        Args:
          process: Iterative process of TFF.

        Returns:
          The parts of the process.

        Raises:
          graph_function.UnsupportedGraphError: If TFF cannot take it apart.
        """
        results = [
            result for _, result in tff_names.iter_elements(process.next.type_signature.result)
        ]
        if len(results) == 2 and not isinstance(results[1], tff_names.FederatedType):
            raise graph_function.UnsupportedGraphError(
                f"the second result of next is {results[1]}: make one value of the server of it, "
                "with tff.federated_zip."
            )
        with _reporting_as_unsupported():
            return cls(
                process.initialize,
                tff_names.get_map_reduce_form_for_computation(process.next, _config()),
            )

    def initialize(self) -> tff_names.Computation:
        """Builds the computation of a first state, of one TensorFlow graph.

        Raises:
          graph_function.UnsupportedGraphError: If TFF cannot take it apart.
        """
        return _merged(self.process_initialize)

    def initialize_function(self) -> Callable[[], list[tf.Tensor]]:
        """Traces the function that makes the flat tensors of a first state.

        Large constants, such as a model's initial weights, are no part of its graph.

        Raises:
          graph_function.UnsupportedGraphError: If TFF cannot take it apart.
        """
        small, constants = large_constants.take_out(self.process_initialize)
        return local_function(_merged(small), constants)

    @property
    def _secure_types(self) -> list[tff_names.Type]:
        """Types of the secure sums: with a bit width, with a largest input, with a modulus."""
        return list(self.round.work.type_signature.result)[1:]

    @property
    def _secure_specs(self) -> list[tf.TensorSpec]:
        return [spec for type_spec in self._secure_types for spec in leaves.specs(type_spec)]

    @property
    def bounds(self) -> list[int | None]:
        """Largest entry that a client may send, for each secure sum; None with a modulus."""
        by_bits, by_input, by_modulus = self._secure_types
        bits = _limits(self.round.secure_sum_bitwidth, by_bits)
        inputs = _limits(self.round.secure_sum_max_input, by_input)
        return [*(2**b - 1 for b in bits), *inputs, *[None] * len(leaves.specs(by_modulus))]

    @property
    def moduli(self) -> list[int | None]:
        """Modulus of each secure sum; None with a bound."""
        moduli = _limits(self.round.secure_modular_sum_modulus, self._secure_types[-1])
        return [*[None] * (len(self._secure_specs) - len(moduli)), *moduli]

    def client_part(self, data: graph_function.GraphFunction | None) -> client_part.ClientPart:
        """Builds the clients' part of a round, with the bounds of their secure sums."""
        return client_part.ClientPart(
            data=data,
            work=graph_of(self.round.work),
            zero=graph_of(self.round.zero),
            accumulate=graph_of(self.round.accumulate),
            merge=graph_of(self.round.merge),
            num_broadcast=len(leaves.specs(self.round.prepare.type_signature.result)),
            secure_shapes=tuple(spec.shape for spec in self._secure_specs),
            bounds=tuple(self.bounds),
        )

    def finish(
        self, memory: draw_memory.DrawMemory | None = None, *, answers_draws: bool = False
    ) -> tuple[Callable[..., list[tf.Tensor]], list[tf.TensorSpec]]:
        """Builds the server's update of a round.

        Args:
          memory: Memory of the draws of its noise; None for none.
          answers_draws: Whether the function is run in this process, which draws secure noise.

        Returns:
          A pair. First, a traceable function: it takes the flat tensors of the server state,
          of the plain sums and of the secure sums (int64), in this order, and returns the flat
          tensors of the new state and of the round's output. Second, the specs of its arguments.
        """
        report = graph_of(self.round.report).importer()

        def edit(graph_def: tf.compat.v1.GraphDef) -> None:
            large_fills.compute(graph_def)
            if memory is not None:
                memory.attach(graph_def)
            if answers_draws:
                secure_noise.answer(graph_def)

        update = graph_of(self.round.update).importer(edit=edit)
        state_specs = leaves.specs(self.round.prepare.type_signature.parameter)
        plain_specs = leaves.specs(self.round.report.type_signature.parameter)
        secure_specs, moduli = self._secure_specs, self.moduli
        num_state, num_plain = len(state_specs), len(plain_specs)

        def finish(*arguments: tf.Tensor) -> list[tf.Tensor]:
            state, sums = arguments[:num_state], arguments[num_state:]
            secure = [
                tf.cast(total if modulus is None else total % modulus, spec.dtype)
                for total, modulus, spec in zip(sums[num_plain:], moduli, secure_specs, strict=True)
            ]
            return update(*state, *report(*sums[:num_plain]), *secure)

        int64_specs = [tf.TensorSpec(spec.shape, tf.int64) for spec in secure_specs]
        return finish, [*state_specs, *plain_specs, *int64_specs]


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


def _limits(computation: tff_names.Computation, summed: tff_names.Type) -> list[int]:
    """Runs a computation without arguments; returns a value for each leaf of the secure sum."""
    values = [int(value) for value in local_function(computation)()]
    return [values[i] for i in leaves.spread(computation.type_signature.result, summed)]


def graph_of(computation: tff_names.Computation) -> graph_function.GraphFunction:
    """Returns the graph of a TensorFlow computation.

    Raises:
      graph_function.UnsupportedGraphError: If the computation is of another kind.
    """
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
    inputs = _tensor_names(content.parameter) if content.HasField("parameter") else []
    outputs = _tensor_names(content.result)
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


def _tensor_names(binding: Any) -> list[str]:
    """Returns the names of a value's leaves in the graph, from TFF's binding of the value."""
    match binding.WhichOneof("binding"):
        case "struct":
            return [name for element in binding.struct.element for name in _tensor_names(element)]
        case "tensor":
            return [binding.tensor.tensor_name]
        case "sequence":
            return [binding.sequence.variant_tensor_name]
        case other:
            raise graph_function.UnsupportedGraphError(f"a part of it has a value that is {other}.")


def local_function(
    computation: tff_names.Computation, constants: Sequence[tf.Tensor] = ()
) -> Callable[..., Any]:
    """Traces a computation of one place as a function of flat tensors, on the CPU.

    Args:
      computation: The computation.
      constants: Constants that `large_constants.take_out` took out of it.

    Returns:
      The function.
    """
    graph, values = _graph_and_values(computation, constants)
    function = graph.importer(edit=large_fills.compute)
    traced = client_part.traced(function, graph.input_specs, device=client_part.CPU)
    return lambda *arguments: traced(*arguments, *values)


def data_graph(
    dataset_fn: Callable[[Any], Any], tensor_spec: Any, data_type: tff_names.Type
) -> graph_function.GraphFunction:
    """Traces the function that makes datasets of a client's tensors.

    Args:
      dataset_fn: Function from a structure of tensors to a dataset, or a structure of datasets.
      tensor_spec: Structure of `tf.TensorSpec` of those tensors.
      data_type: TFF's type of the datasets.

    Returns:
      The graph; its outputs are variants.

    Raises:
      ValueError: If `dataset_fn` makes datasets of another type.
      graph_function.UnsupportedGraphError: If it captures tensors from outside.
    """

    def variants(*flat: tf.Tensor) -> list[tf.Tensor]:
        made = dataset_fn(tf.nest.pack_sequence_as(tensor_spec, flat))
        return leaves.flatten(made, data_type, "the result of dataset_fn")

    return graph_function.GraphFunction.trace(variants, tf.nest.flatten(tensor_spec))
