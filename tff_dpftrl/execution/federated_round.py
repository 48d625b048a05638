"""A round of federated learning as TensorFlow graphs: those of its clients and of its server.

`learning` builds it from a model, optimizers and a private round; `process_form` builds it from a
process of TFF. The simulation, the plans of device tasks and the audits take it from either.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tree
from typing_extensions import override

from tff_dpftrl import array_tensors, validation
from tff_dpftrl.execution import entropy as entropy_lib
from tff_dpftrl.execution import graph_function, large_fills, secure_noise
from tff_dpftrl.private_round import secure_calls

VARIANT = tf.TensorSpec([], tf.variant)
"""Spec of a dataset among the tensors of a value."""


class Structure(abc.ABC):
    """Containers of a value, and what is known of the tensors in them.

    `labels` has the path of each tensor, such as "train/loss"; "" if the value is a tensor itself.
    `specs` has shape and dtype of each; a dataset is a scalar variant.
    """

    labels: tuple[str, ...]
    specs: tuple[tf.TensorSpec, ...]

    @abc.abstractmethod
    def flatten(self, value: Any, name: str, *, shares_arrays: bool = False) -> list[tf.Tensor]:
        """Flattens a value to tensors.

        Args:
          value: Containers of arrays, numbers, tensors or datasets.
          name: Name of the value, for errors.
          shares_arrays: Whether a tensor may share the memory of its array, which must not be
            changed then.

        Returns:
          The tensors; those of this process are not copied.

        Raises:
          UsageError: If the value has another structure; the message names the place.
        """

    @abc.abstractmethod
    def pack(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Puts tensors, one for each of `specs`, into the containers."""


class Nest(Structure):
    """Structure of dictionaries, whose order is that of their keys, sequences and named tuples."""

    def __init__(self, template: Any):
        """Reads a structure of tensors, `tf.TensorSpec`s or `tf.data.DatasetSpec`s."""
        self.template = tree.map_structure(_spec, template)
        """Containers of specs."""
        pairs = tree.flatten_with_path(self.template)
        self.labels = tuple("/".join(map(str, path)) for path, _ in pairs)
        self._leaves = [leaf for _, leaf in pairs]
        self.specs = tuple(
            VARIANT if isinstance(leaf, tf.data.DatasetSpec) else leaf for leaf in self._leaves
        )

    @override
    def flatten(self, value, name, *, shares_arrays=False):
        try:
            tree.assert_same_structure(self.template, value, check_types=False)
        except (TypeError, ValueError) as error:
            raise validation.UsageError(
                f"{name} must have the tensors {list(self.labels)}: {validation.one_line(error)}"
            ) from error
        return [
            _leaf(one, leaf, f"{name}/{label}" if label else name, shares_arrays)
            for one, leaf, label in zip(tree.flatten(value), self._leaves, self.labels, strict=True)
        ]

    @override
    def pack(self, tensors):
        return tree.unflatten_as(
            self.template,
            [
                tf.data.experimental.from_variant(tensor, leaf.element_spec)
                if isinstance(leaf, tf.data.DatasetSpec)
                else tensor
                for tensor, leaf in zip(tensors, self._leaves, strict=True)
            ],
        )


class SecureSum(NamedTuple):
    """Sum of one tensor of integers over clients.

    It has either the largest entry that a client may send, or a modulus.
    """

    spec: tf.TensorSpec
    largest_entry: int | None = None
    modulus: int | None = None


class Access(NamedTuple):
    """Function of a state that is no part of a round, such as the one that returns the weights."""

    graph: graph_function.GraphFunction
    arguments: tuple[Structure, ...]
    result: Structure


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FederatedRound:
    """A round of federated learning.

    A client's report has the tensors that are summed as they are, then those of secure sums.

    Attributes:
      state: Structure of the server's state.
      client: Structure of one client's data.
      broadcast: Structure of what clients are sent.
      report: Structure of a client's report.
      output: Structure of what a round returns beside the new state.
      secure_sums: Secure sums, of the last tensors of a report.
      initialize: Function that makes the flat tensors of a first state, with new random numbers
        each time.
      initialize_in_graph: The same to be traced; None if `initialize` can be.
      prepare: Graph from the state to the broadcast tensors.
      work: Graph from a client's tensors and the broadcast ones to a report.
      zero: Graph of the sum of no reports, without the secure sums.
      accumulate: Graph from a sum and the plain tensors of a report to their sum.
      merge: Graph from two sums to their sum.
      closing: Graph from the plain sums to those that `update` takes; None if they are the same.
      update: Graph from the state, the plain sums and the secure ones to the new state and the
        output. Secure noise is left open in it (`secure_calls`).
      accesses: Functions of a state, by name: "get_model_weights", "set_model_weights" and so on.
      result: Function from the new state and the output to what `next` of a process returns.
    """

    state: Structure
    client: Structure
    broadcast: Structure
    report: Structure
    output: Structure
    secure_sums: tuple[SecureSum, ...]
    initialize: Callable[[], list[tf.Tensor]]
    prepare: graph_function.GraphFunction
    work: graph_function.GraphFunction
    zero: graph_function.GraphFunction
    accumulate: graph_function.GraphFunction
    merge: graph_function.GraphFunction
    closing: graph_function.GraphFunction | None = None
    update: graph_function.GraphFunction
    accesses: Mapping[str, Access]
    result: Callable[[Any, Any], Any]
    initialize_in_graph: Callable[[], list[tf.Tensor]] | None = None

    def finish(
        self, *, answers_draws: bool = False, entropy: entropy_lib.Repeated | None = None
    ) -> tuple[Callable[..., list[tf.Tensor]], list[tf.TensorSpec]]:
        """Builds the server's part of a round.

        The first result is a traceable function from the flat tensors of the server state, of the
        plain sums and of the secure sums (int64), in this order, to those of the new state and of
        the round's output. The second has the specs of its arguments. `answers_draws` says whether
        the function is run in this process, which draws secure noise. It reads `entropy` in place
        of the operating system's bits, in tests and audits only.
        """

        def edit(graph_def: tf.compat.v1.GraphDef) -> None:
            large_fills.compute(graph_def)
            if entropy is not None:
                entropy.read_instead(graph_def)
            if answers_draws:
                secure_noise.answer(graph_def)

        close = (lambda *sums: sums) if self.closing is None else self.closing.importer()
        update = self.update.importer(edit=edit)
        plain_specs = self.merge.input_specs[: len(self.merge.input_specs) // 2]
        num_state, num_plain = len(self.state.specs), len(plain_specs)

        def finish(*arguments: tf.Tensor) -> list[tf.Tensor]:
            state, sums = arguments[:num_state], arguments[num_state:]
            secure = [
                tf.cast(total if one.modulus is None else total % one.modulus, one.spec.dtype)
                for total, one in zip(sums[num_plain:], self.secure_sums, strict=True)
            ]
            return update(*state, *close(*sums[:num_plain]), *secure)

        int64_specs = [tf.TensorSpec(one.spec.shape, tf.int64) for one in self.secure_sums]
        return finish, [*self.state.specs, *plain_specs, *int64_specs]


def trace(
    function: Callable[..., Any], *arguments: Structure
) -> tuple[graph_function.GraphFunction, Nest]:
    """Traces a function of structures.

    The graph has flat tensors. Secure noise stays open in it. What captures tensors or variables
    from outside is refused (`graph_function.UnsupportedGraphError`).
    """
    results: list[Nest] = []

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        remaining = iter(tensors)
        values = [one.pack([next(remaining) for _ in one.specs]) for one in arguments]
        result = tree.map_structure(tf.convert_to_tensor, function(*values))
        results[:] = [Nest(result)]
        return tree.flatten(result)

    specs = [spec for one in arguments for spec in one.specs]
    with secure_calls.graphs_for_others():
        return graph_function.GraphFunction.trace(flat, specs), results[0]


class SecurePart(NamedTuple):
    """Part of a client's report that is summed securely.

    It has either the largest entry that a client may send, or the modulus of each sum, in the
    structure of `value`.
    """

    value: Any
    largest_entry: int | None = None
    moduli: Any = None

    def sums(self) -> Iterator[SecureSum]:
        """Yields the secure sums of the part, in the order of its tensors."""
        tensors = tree.flatten(self.value)
        moduli = [None] * len(tensors)
        if self.moduli is not None:
            tree.assert_same_structure(self.value, self.moduli, check_types=False)
            moduli = tree.flatten(self.moduli)
        for tensor, modulus in zip(tensors, moduli, strict=True):
            yield SecureSum(_spec(tensor), self.largest_entry, modulus)


class Report(NamedTuple):
    """A client's report, or the sums of reports.

    `plain` is summed as it is; `secure` has structures that are summed securely, by name.
    """

    plain: Any
    secure: Any


class Result(NamedTuple):
    """Result of `CompiledProcess.next`."""

    state: Any
    metrics: Any


def compose(
    *,
    initialize: Callable[[], Any],
    client: Any,
    prepare: Callable[[Any], Any],
    work: Callable[[Any, Any], tuple[Any, Mapping[str, SecurePart]]],
    update: Callable[[Any, Any, Mapping[str, Any]], tuple[Any, Any]],
    accesses: Mapping[str, tuple[Callable[..., Any], Sequence[Callable[[Any], Any]]]] | None = None,
) -> FederatedRound:
    """Composes a round of functions of structures, as `Nest` has them.

    `client` is a template of a client's data, as for `Nest`. `work` returns what is summed as it
    is, and what is summed securely. `update` returns the new state and the output. `accesses` have
    functions of a state, by name, each with functions from the template of the state to those of
    its further arguments.
    """
    limits: list[SecureSum] = []

    def report(value: Any, broadcast: Any) -> Report:
        plain, secure = work(value, broadcast)
        limits[:] = [one for _, part in sorted(secure.items()) for one in part.sums()]
        return Report(plain, {name: part.value for name, part in secure.items()})

    def finish(state: Any, plain: Any, secure: Any) -> Any:
        after, output = update(state, plain, secure)
        # The state keeps its shapes: what is unknown of them in a graph, its template says.
        tree.map_structure(
            lambda tensor, spec: tensor.set_shape(spec.shape), after, state_structure.template
        )
        return Result(after, output)

    with tf.Graph().as_default():  # For its shapes only: nothing is computed.
        state_structure = Nest(tree.map_structure(_array, initialize()))
    client_structure = Nest(client)
    prepare_graph, broadcast = trace(prepare, state_structure)
    work_graph, sent = trace(report, client_structure, broadcast)
    plain, secure = map(Nest, sent.template)
    zero, _ = trace(
        lambda: tree.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), plain.template)
    )
    add, _ = trace(lambda one, other: tree.map_structure(tf.add, one, other), plain, plain)
    update_graph, result = trace(finish, state_structure, plain, secure)

    def access(function: Callable[..., Any], further: Sequence[Callable[[Any], Any]]) -> Access:
        arguments = (state_structure, *(Nest(one(state_structure.template)) for one in further))
        graph, returned = trace(function, *arguments)
        return Access(graph, arguments, returned)

    return FederatedRound(
        state=state_structure,
        client=client_structure,
        broadcast=broadcast,
        report=sent,
        output=Nest(result.template.metrics),
        secure_sums=tuple(limits),
        initialize=lambda: tree.flatten(tree.map_structure(tf.convert_to_tensor, initialize())),
        prepare=prepare_graph,
        work=work_graph,
        zero=zero,
        accumulate=add,
        merge=add,
        update=update_graph,
        accesses={name: access(*one) for name, one in (accesses or {}).items()},
        result=Result,
    )


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, tf.TensorSpec | tf.data.DatasetSpec):
        return leaf
    return tf.TensorSpec(leaf.shape, leaf.dtype)


def _leaf(value: Any, spec: Any, name: str, shares_arrays: bool) -> tf.Tensor:
    if isinstance(spec, tf.data.DatasetSpec):
        return _dataset(value, spec.element_spec, name)
    if shares_arrays and isinstance(value, np.ndarray) and value.dtype == spec.dtype:
        value = array_tensors.tensor(value)
    return to_tensor(value, spec, name)


def _dataset(value: Any, element_spec: Any, name: str) -> tf.Tensor:
    """Returns the variant of a dataset after checking its elements."""
    found = getattr(value, "element_spec", None)
    if not takes(element_spec, found):
        raise validation.UsageError(
            f"{name} must be a dataset with elements {element_spec}, got {found or type(value)}."
        )
    return as_variant(value)


def takes(wanted: Any, found: Any) -> bool:
    """Returns whether all that has the specs `found` has those of `wanted`, structures of specs."""
    try:
        tf.nest.assert_same_structure(wanted, found)
        pairs = zip(tf.nest.flatten(wanted), tf.nest.flatten(found), strict=True)
        return all(one.is_compatible_with(other) for one, other in pairs)
    except (TypeError, ValueError):
        return False


def as_variant(dataset: tf.data.Dataset) -> tf.Tensor:
    """Converts a dataset to a tensor, without optimisation and autotuning of its pipeline.

    A client reads a handful of batches, which takes less time than to optimise and tune the
    pipeline. Elements and their order are the same.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return tf.data.experimental.to_variant(dataset.with_options(options))


def to_tensor(value: Any, spec: tf.TensorSpec, name: str) -> tf.Tensor:
    """Converts one leaf to a tensor.

    A value that does not fit the spec is refused, for instance because it would overflow.
    """
    try:
        tensor = tf.convert_to_tensor(value, spec.dtype)
    except (ValueError, TypeError) as error:
        raise validation.UsageError(
            f"{name} must be a tensor of dtype {spec.dtype.name}: {error}"
        ) from error
    if not spec.shape.is_compatible_with(tensor.shape):
        raise validation.UsageError(f"{name} must be of shape {spec.shape}, got {tensor.shape}.")
    if spec.dtype.is_integer and not isinstance(value, tf.Tensor):
        # TensorFlow keeps the low bits of an integer that is too large.
        given = np.asarray(value)
        if given.dtype != spec.dtype.as_numpy_dtype and not np.array_equal(given, tensor.numpy()):
            raise validation.UsageError(
                f"{name} must be in the range of {spec.dtype.name}, got {value}."
            )
    return tensor
