"""Rounds of federated learning as plain TensorFlow functions in this process.

TFF's executor sends the state of a process to a worker and back in every round, and runs every
client through several layers. A process that can be written as a `MapReduceForm` does not need it:
its TensorFlow graphs are taken out once and called directly. The state stays in this process. TFF
is imported only where there is such a process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import client_part, federated_round, graph_function
from tff_dpftrl.execution import entropy as entropy_lib

if TYPE_CHECKING:
    import tensorflow_federated as tff


class NotCompilableError(validation.UsageError):
    """The process can only be run by TFF."""


def compile_process(
    process: tff.templates.IterativeProcess,
    *,
    dataset_fn: Callable[[Any], Any] | None = None,
    tensor_spec: Any = None,
    clients: client_part.ClientRunner | None = None,
) -> CompiledProcess:
    """Compiles a process, so that its rounds run in this Python process.

    It works for every process that has a `tff.backends.mapreduce.MapReduceForm`: those of
    this package, TFF's federated averaging and its relatives, with any aggregator of one
    phase. Secure sums are computed in the clear, as in TFF's test context: for simulations
    only. It takes one to two seconds, and starts no worker of TFF's.

    Example:
      ```
      process = tff_dpftrl.compile_process(process)
      state = process.initialize()
      state = process.next(state, client_datasets).state
      ```

    On one machine with one TensorFlow a round has the same bits whatever the number of
    clients that work at the same time. TFF's worker is another build of TensorFlow and adds
    up in another order: from the same state, the model after a round differs from TFF's by
    roundings, whose norm was at most 6e-7 of that of the round's change (word LSTMs of 8
    thousand to 4 million parameters, 1.3e-7 with the aggregators' noise). Training amplifies
    such differences: after 12 rounds weights were 5e-7 apart with noise, 8e-6 without, and
    further with learning rates that hardly converge. So resume a run in the engine that it
    began with.

    TensorFlow's random operations draw new numbers in every call, as in TFF. Those with an
    explicit seed, `tf.random.normal([], seed=1)`, restart whenever TFF makes a session for a
    call. Here they continue, in the order in which clients happen to run, and restart in
    another compiled process, after a resume, and in every worker of Ray. Never use them for
    noise. Stateless operations, which the aggregators use, are not affected.

    Call `execution.limit_operation_threads` at the start of the program, before TensorFlow's
    first operation, so that clients in parallel threads do not wait for each other.

    A client's `dataset.reduce`, which TFF's learning processes have by default, runs as a loop:
    TensorFlow would prepare the reduced function again for every client, as TFF's worker does.

    Args:
      process: Iterative process of TFF to compile.
      dataset_fn: Function from a structure of a client's tensors to its dataset (or structure
        of datasets), traced once. `next` then takes such tensors instead of datasets, and
        no pipeline is built in Python for each client.
      tensor_spec: Structure of `tf.TensorSpec` of those tensors, for `dataset_fn`.
      clients: Runner of the clients; threads of this process if None.

    Returns:
      The process, with methods of the same names, arguments and results.

    Raises:
      NotCompilableError: If it is no iterative process, has no MapReduceForm, or keeps state
        in TensorFlow resources that clients would share.
      ValueError: If `dataset_fn` does not make the process's datasets, or only one of it
        and `tensor_spec` is given.
    """
    return of_process(process, dataset_fn=dataset_fn, tensor_spec=tensor_spec, clients=clients)


def of_process(
    process: tff.templates.IterativeProcess,
    *,
    dataset_fn: Callable[[Any], Any] | None,
    tensor_spec: Any,
    clients: client_part.ClientRunner | None,
    entropy: entropy_lib.Repeated | None = None,
) -> CompiledProcess:
    """Compiles a process; with `entropy`, for tests and audits only, nothing is private."""
    _check_pair(dataset_fn, tensor_spec)
    from tff_dpftrl.execution import process_form, tff_names

    if isinstance(process, tff_names.Computation):
        raise NotCompilableError(
            "process is a computation, and no tff.templates.IterativeProcess: call it, and TFF "
            "runs it."
        )
    with _refusing_the_process():
        return CompiledProcess(
            process_form.round_of(process),
            dataset_fn=dataset_fn,
            tensor_spec=tensor_spec,
            clients=clients,
            entropy=entropy,
        )


@contextlib.contextmanager
def _refusing_the_process() -> Iterator[None]:
    try:
        yield
    except graph_function.UnsupportedGraphError as error:
        raise NotCompilableError(
            f"The process cannot be compiled, and has to be run by TFF: {error}"
        ) from error


def _check_pair(dataset_fn: Any, tensor_spec: Any) -> None:
    if (dataset_fn is None) != (tensor_spec is None):
        raise validation.UsageError(
            "dataset_fn and tensor_spec belong together: give both or none."
        )


class CompiledProcess:
    """Round of federated learning that runs in this Python process.

    It has the methods of a `tff.learning.templates.LearningProcess`. A state is in the same
    containers, with `tf.Tensor`s as leaves, and may be given with NumPy arrays; metrics are
    NumPy arrays.
    """

    def __init__(
        self,
        round_: federated_round.FederatedRound,
        *,
        dataset_fn: Callable[[Any], Any] | None = None,
        tensor_spec: Any = None,
        clients: client_part.ClientRunner | None = None,
        entropy: entropy_lib.Repeated | None = None,
    ):
        """Traces the parts of a round, with the arguments of `compile_process`.

        `entropy`, for tests and audits only, has bits that every round reads in place of the
        operating system's. Rounds from one state then have the same noise, and nothing is private.
        A graph that cannot be run in this way raises `graph_function.UnsupportedGraphError`.
        """
        _check_pair(dataset_fn, tensor_spec)
        # The round itself is not kept: it holds the initial weights, several times.
        self._state, self._client, self._output = round_.state, round_.client, round_.output
        self._result, self._accesses = round_.result, round_.accesses
        self._tensor_spec = tensor_spec
        self._runner = client_part.ThreadedClients() if clients is None else clients
        data = None
        if dataset_fn is not None:
            data = data_graph(dataset_fn, tensor_spec, round_.client)
        self._clients = client_part.ClientFunctions(client_part.ClientPart.of(round_, data))
        self._initialize: Callable[[], list[tf.Tensor]] | None = round_.initialize
        self._prepare = client_part.local(round_.prepare)
        self._entropy = entropy  # Its file lasts as long as what reads it.
        finish, specs = round_.finish(answers_draws=True, entropy=entropy)
        self._finish = client_part.traced(finish, specs, device=client_part.CPU)
        self._traced: dict[str, Callable[..., list[tf.Tensor]]] = {}

    def initialize(self) -> Any:
        """Returns a first state; its random numbers are drawn anew at every call.

        Raises:
          RuntimeError: If `drop_initialization` was called.
        """
        if self._initialize is None:
            raise RuntimeError("drop_initialization was called: there is no first state any more.")
        with tf.device(client_part.CPU):
            return self._state.pack(self._initialize())

    def drop_initialization(self) -> None:
        """Frees what only `initialize` needs, such as initial weights; it then raises an error."""
        self._initialize = None

    def as_tensors(self, state: Any) -> Any:
        """Returns a state of NumPy arrays as one of tensors, which `next` does not copy.

        The tensors may share the memory of the arrays: do not change these afterwards.
        """
        return self._state.pack(self._state.flatten(state, "state", shares_arrays=True))

    def next(self, state: Any, client_data: Sequence[Any]) -> Any:
        """Runs a round.

        Args:
          state: State that `initialize` or an earlier round returned, or NumPy arrays in the
            same containers.
          client_data: Value of each client: a dataset, a list of elements, tensors, or a
            structure of those, as the process takes it; or the argument of `dataset_fn`.

        Returns:
          Result of the process's `next`: for a learning process new state and metrics.

        Raises:
          ValueError: If an argument is not of the process's type.
          tf.errors.OpError: If a computation fails.
        """
        if not isinstance(client_data, list | tuple):
            raise validation.UsageError(
                f"client_data must be a list with a value for each client, got {type(client_data)}."
            )
        state_leaves = self._state.flatten(state, "state")
        clients = [
            functools.partial(self._client_leaves, value, f"client_data[{index}]")
            for index, value in enumerate(client_data)
        ]
        broadcast = self._prepare(*state_leaves)
        total = self._runner.sum(self._clients, clients, broadcast)
        results = self._finish(*state_leaves, *total)
        split = len(self._state.specs)
        output = self._output.pack([_as_numpy(leaf) for leaf in results[split:]])
        return self._result(self._state.pack(results[:split]), output)

    def _client_leaves(self, value: Any, name: str) -> Sequence[tf.Tensor]:
        if self._tensor_spec is None:
            return self._client.flatten(value, name)
        try:
            tf.nest.assert_same_structure(value, self._tensor_spec)
        except (TypeError, ValueError) as error:
            raise validation.UsageError(
                f"{name} must be arrays like tensor_spec: {error}"
            ) from error
        pairs = zip(tf.nest.flatten(value), tf.nest.flatten(self._tensor_spec), strict=True)
        return [federated_round.to_tensor(leaf, spec, name) for leaf, spec in pairs]

    def get_model_weights(self, state: Any) -> Any:
        """Returns the model's weights in a state, as tensors; for learning processes."""
        return self._call("get_model_weights", state)

    def set_model_weights(self, state: Any, model_weights: Any) -> Any:
        """Returns a state with other model weights; for learning processes."""
        return self._call("set_model_weights", state, model_weights)

    def get_hparams(self, state: Any) -> Any:
        """Returns the hyperparameters in a state; for learning processes."""
        return self._call("get_hparams", state)

    def set_hparams(self, state: Any, hparams: Any) -> Any:
        """Returns a state with other hyperparameters; for learning processes."""
        return self._call("set_hparams", state, hparams)

    def _call(self, name: str, *arguments: Any) -> Any:
        access = self._accesses.get(name)
        if access is None:
            raise AttributeError(f"The process has no {name}.")
        if name not in self._traced:
            self._traced[name] = client_part.local(access.graph)
        flat = [
            leaf
            for argument, structure in zip(arguments, access.arguments, strict=True)
            for leaf in structure.flatten(argument, f"argument of {name}")
        ]
        return access.result.pack(self._traced[name](*flat))

    def close(self) -> None:
        """Stops the threads or workers of the clients; no round can follow."""
        self._runner.close()


def data_graph(
    dataset_fn: Callable[[Any], Any], tensor_spec: Any, client: federated_round.Structure
) -> graph_function.GraphFunction:
    """Traces the function that makes a client's value, such as a dataset, of its tensors.

    For a dataset, its output is a variant.
    """

    def variants(*flat: tf.Tensor) -> list[tf.Tensor]:
        made = dataset_fn(tf.nest.pack_sequence_as(tensor_spec, flat))
        return client.flatten(made, "the result of dataset_fn")

    return graph_function.GraphFunction.trace(variants, tf.nest.flatten(tensor_spec))


def _as_numpy(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf
