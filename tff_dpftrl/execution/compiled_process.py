"""Rounds of a TFF process as plain TensorFlow functions in this process.

TFF's executor sends the state of a process to a worker and back in every round, and runs
every client through layers of its own. A process that can be written as a `MapReduceForm`
needs none of it: what clients and server compute are TensorFlow graphs, which are taken
out of the process once and called directly. The state stays where it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.execution import client_part, graph_function, leaves, process_form


class NotCompilableError(validation.UsageError):
    """A process that can only be run by TFF."""


def compile_process(
    process: tff.templates.IterativeProcess,
    *,
    dataset_fn: Callable[[Any], Any] | None = None,
    tensor_spec: Any = None,
    clients: client_part.ClientRunner | None = None,
) -> CompiledProcess:
    """Compiles a process, so that its rounds run in this Python process.

    For every process that has a `tff.backends.mapreduce.MapReduceForm`: ours, TFF's
    federated averaging and its relatives, with any aggregator but those of several
    phases. Sums that would be secure are computed in the clear, as in TFF's test context:
    for simulations only. It takes one to two seconds, and starts no worker of TFF's.

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
    thousand to 4 million parameters, 1.3e-7 with our aggregators' noise). Training amplifies
    what differs, as it does any rounding: after 12 rounds weights were 5e-7 apart with noise,
    8e-6 without, and further with learning rates that hardly converge. So go on with a run in
    the engine that it began with.

    TensorFlow's random operations draw new numbers in every call, as in TFF. Those with a seed
    of their own, `tf.random.normal([], seed=1)`, begin anew whenever TFF makes a session for a
    call; here they go on, in the order in which clients happen to come, and begin anew in
    another compiled process, after a resume, and in every worker of Ray. Never use them for
    noise. Stateless operations, which our aggregators use, have none of this.

    Call `execution.limit_operation_threads` at the start of the program, before TensorFlow's
    first operation: clients that work side by side then need not wait for each other.

    Build the process with `tff.learning.LoopImplementation.DATASET_ITERATOR`, if its builder
    has the argument: TensorFlow prepares the function that a `dataset.reduce` calls, which is
    TFF's default, again for every client, here as in TFF's worker.

    Args:
      process: The process.
      dataset_fn: From a structure of a client's tensors to its dataset (or structure of
        datasets), traced once; `next` then takes such tensors instead of datasets, and
        no pipeline is built in Python for each client.
      tensor_spec: Structure of `tf.TensorSpec` of those tensors, for `dataset_fn`.
      clients: Runs the clients; in threads of this process if None.

    Returns:
      The process, with methods of the same names, arguments and results.

    Raises:
      NotCompilableError: If the process has no MapReduceForm, or keeps state in
        TensorFlow resources that clients would share.
      ValueError: If `dataset_fn` does not make the process's datasets, or only one of it
        and `tensor_spec` is given.
    """
    if (dataset_fn is None) != (tensor_spec is None):
        raise validation.UsageError(
            "dataset_fn and tensor_spec belong together: give both or none."
        )
    if clients is None:
        clients = client_part.ThreadedClients()
    with _refusing_the_process():
        form = process_form.ProcessForm.of(process)
    data_type = leaves.member(process.next.type_signature.parameter[1])
    data = (
        None if dataset_fn is None else process_form.data_graph(dataset_fn, tensor_spec, data_type)
    )
    with _refusing_the_process():
        return CompiledProcess(process, form, data, tensor_spec, clients)


@contextlib.contextmanager
def _refusing_the_process() -> Iterator[None]:
    try:
        yield
    except graph_function.UnsupportedGraphError as error:
        raise NotCompilableError(
            f"The process cannot be compiled, and has to be run by TFF: {error}"
        ) from error


class CompiledProcess:
    """A process whose rounds run in this Python process; `compile_process` makes it.

    It has the methods of a `tff.learning.templates.LearningProcess`. A state is in the same
    containers, with `tf.Tensor`s as leaves, and may be given with NumPy arrays; metrics are
    NumPy's.
    """

    def __init__(
        self,
        process: tff.templates.IterativeProcess,
        form: process_form.ProcessForm,
        data: graph_function.GraphFunction | None,
        tensor_spec: Any,
        clients: client_part.ClientRunner,
    ):
        """As `compile_process`, of which it is a part."""
        self._process = process
        self._tensor_spec = tensor_spec
        self._runner = clients
        self._state_type, self._data_type = map(
            leaves.member, process.next.type_signature.parameter
        )
        self._result_type = process.next.type_signature.result
        self._clients = client_part.ClientFunctions(form.client_part(data))
        self._initialize = process_form.local_function(form.initialize)
        self._prepare = process_form.local_function(form.round.prepare)
        finish, specs = form.finish()
        self._finish = client_part.traced(finish, specs, device=client_part.CPU)
        self._unplaced: dict[str, Callable[..., Any]] = {}

    def initialize(self) -> Any:
        """Returns a first state; what is random in it is drawn anew at every call."""
        return leaves.pack(self._initialize(), self._state_type)

    def next(self, state: Any, client_data: Sequence[Any]) -> Any:
        """Runs a round.

        Args:
          state: What `initialize` or an earlier round returned, or NumPy arrays in the
            same containers.
          client_data: A value for each client: a dataset, a list of elements, tensors, or
            a structure of those, as the process takes it; or what `dataset_fn` takes.

        Returns:
          What the process returns: new state and metrics, for a learning process.

        Raises:
          ValueError: If an argument is not of the process's type.
          tf.errors.OpError: If a computation fails.
        """
        if not isinstance(client_data, list | tuple):
            raise validation.UsageError(
                f"client_data must be a list with a value for each client, got {type(client_data)}."
            )
        state_leaves = leaves.flatten(state, self._state_type, "state")
        clients = [
            functools.partial(self._client_leaves, value, f"client_data[{index}]")
            for index, value in enumerate(client_data)
        ]
        broadcast = self._prepare(*state_leaves)
        total = self._runner.sum(self._clients, clients, broadcast)
        results = self._finish(*state_leaves, *total)
        (state_name, state_type), (output_name, output_type) = [
            (name, leaves.member(type_spec))
            for name, type_spec in tff.structure.iter_elements(self._result_type)
        ]
        split = len(leaves.specs(state_type))
        new_state = leaves.pack(results[:split], state_type)
        output = leaves.to_numpy(leaves.pack(results[split:], output_type))
        container = self._result_type.python_container or tuple
        if state_name is None:
            return container([new_state, output])
        return container(**{state_name: new_state, output_name: output})

    def _client_leaves(self, value: Any, name: str) -> Sequence[tf.Tensor]:
        if self._tensor_spec is None:
            return leaves.flatten(value, self._data_type, name)
        try:
            tf.nest.assert_same_structure(value, self._tensor_spec)
        except (TypeError, ValueError) as error:
            raise validation.UsageError(
                f"{name} must be arrays like tensor_spec: {error}"
            ) from error
        pairs = zip(tf.nest.flatten(value), tf.nest.flatten(self._tensor_spec), strict=True)
        return [leaves.to_tensor(leaf, spec, name) for leaf, spec in pairs]

    def get_model_weights(self, state: Any) -> Any:
        """The model's weights in a state, as tensors; for learning processes."""
        return self._call("get_model_weights", state)

    def set_model_weights(self, state: Any, model_weights: Any) -> Any:
        """A state with other model weights; for learning processes."""
        return self._call("set_model_weights", state, model_weights)

    def get_hparams(self, state: Any) -> Any:
        """The hyperparameters in a state; for learning processes."""
        return self._call("get_hparams", state)

    def set_hparams(self, state: Any, hparams: Any) -> Any:
        """A state with other hyperparameters; for learning processes."""
        return self._call("set_hparams", state, hparams)

    def _call(self, name: str, *arguments: Any) -> Any:
        computation = getattr(self._process, name)
        if name not in self._unplaced:
            self._unplaced[name] = process_form.local_function(computation)
        parameter = computation.type_signature.parameter
        types = [parameter] if len(arguments) == 1 else list(parameter)
        flat = [
            leaf
            for argument, type_spec in zip(arguments, types, strict=True)
            for leaf in leaves.flatten(argument, type_spec, f"argument of {name}")
        ]
        return leaves.pack(self._unplaced[name](*flat), computation.type_signature.result)

    def close(self) -> None:
        """Ends the threads or workers of the clients; no round can follow."""
        self._runner.close()
