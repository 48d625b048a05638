"""Clients' part of a round: their work, and its sums in a fixed order.

Floating-point sums depend on their order. Here it depends on the number of clients only:
they are cut into `chunks`, the clients of a chunk are added one after the other, and then
the chunks. The result has the same bits in any number of threads or processes.

Needs TensorFlow only: a `ClientPart` is plain data that can be sent to another process.
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl.execution import federated_round, graph_function, large_fills, reductions

Tensors: TypeAlias = list[tf.Tensor]
"""Leaves of one value, in TFF's order."""

CPU = "/CPU:0"
"""Device of all sums and noise: it has no reduced precision."""

_MAX_CHUNKS = 64
_MIN_CLIENTS = 2
_CLIENTS_A_CALL = 16
"""Number of clients whose values one call holds; a round can be interrupted between calls."""
_LARGE_SUM = 8_000_000
"""Bytes of a sum, of a model of a million weights, from which on memory matters more than waits."""
_CLIENTS_AT_ONCE = 2
"""Number of a call's clients in flight: one begins while another's result is clipped and added."""


def chunks(num_clients: int) -> list[range]:
    """Cuts the clients of a round into chunks, each of which is summed before all of them.

    At most 64 ranges; all but the last one are of the same size, at least 2 clients.
    """
    size = max(_MIN_CLIENTS, -(-num_clients // _MAX_CHUNKS))
    return [range(i, min(i + size, num_clients)) for i in range(0, num_clients, size)]


@dataclasses.dataclass(frozen=True)
class ClientPart:
    """Graphs of the clients' computations and of their sums.

    Attributes:
      data: Graph from a client's tensors to its datasets (variants); None if `work` takes a
        client's values themselves.
      work: Graph from a client's values and the broadcast tensors to a client's result: first
        the tensors for `accumulate`, then those that are summed securely.
      zero: Graph of the sum of no clients, without the secure sums.
      accumulate: Graph from a sum and a client's result to their sum.
      merge: Graph from two sums to their sum.
      num_broadcast: Number of tensors that are broadcast.
      secure_sums: Secure sums, of the last tensors of a client's result.
    """

    data: graph_function.GraphFunction | None
    work: graph_function.GraphFunction
    zero: graph_function.GraphFunction
    accumulate: graph_function.GraphFunction
    merge: graph_function.GraphFunction
    num_broadcast: int
    secure_sums: tuple[federated_round.SecureSum, ...]

    @classmethod
    def of(
        cls, round_: federated_round.FederatedRound, data: graph_function.GraphFunction | None
    ) -> ClientPart:
        """Takes the clients' part out of a round."""
        return cls(
            data=data,
            work=round_.work,
            zero=round_.zero,
            accumulate=round_.accumulate,
            merge=round_.merge,
            num_broadcast=len(round_.broadcast.specs),
            secure_sums=round_.secure_sums,
        )


class ClientFunctions:
    """Client part, traced in this process.

    A client's work runs on the first GPU that TensorFlow sees, as far as it has kernels there.
    """

    def __init__(self, part: ClientPart):
        """Traces the graphs, which takes a second or so."""
        self.part = part
        """Client part from which it was traced."""
        split = len(part.work.inputs) - part.num_broadcast
        broadcast_specs = part.work.input_specs[split:]
        num_plain = len(part.zero.outputs)
        # A client's result may have other tensors than a sum: encoded ones, for instance.
        num_result = len(part.work.outputs) - len(part.secure_sums)
        data = part.data.importer() if part.data else lambda *values: values
        self._value_specs = part.data.input_specs if part.data else part.work.input_specs[:split]
        work = part.work.importer(edit=_edit_work)
        zero, accumulate, merge = (
            graph.importer(edit=large_fills.compute)
            for graph in (part.zero, part.accumulate, part.merge)
        )
        secure_specs = [tf.TensorSpec(one.spec.shape, tf.int64) for one in part.secure_sums]
        self.sum_specs = [*part.merge.input_specs[:num_plain], *secure_specs]
        """Specs of the leaves of a sum."""
        num_bytes = sum(
            spec.shape.num_elements() * spec.dtype.size
            for spec in self.sum_specs
            if spec.shape.is_fully_defined() and spec.dtype not in (tf.string, tf.variant)
        )
        self.is_large = num_bytes >= _LARGE_SUM
        """Whether a sum is so large that as few clients as possible are in flight."""

        secure_zero = graph_function.GraphFunction.trace(
            lambda: [tf.zeros(spec.shape, spec.dtype) for spec in secure_specs], []
        ).importer(edit=large_fills.compute)

        def start() -> Tensors:
            return [*zero(), *secure_zero()]

        # Operations without a device in a loop run where the loop is, on the CPU.
        work_device = "/GPU:0" if tf.config.list_logical_devices("GPU") else None

        def add_client(total: Tensors, values: Tensors, broadcast: Tensors) -> Tensors:
            with tf.device(work_device):
                result = work(*data(*values), *broadcast)
            secure = list(map(_as_summand, result[num_result:], part.secure_sums))
            plain = accumulate(*total[:num_plain], *result[:num_result])
            return [*plain, *_added(total[num_plain:], secure)]

        def add_clients(*arguments: tf.Tensor) -> Tensors:
            remaining = iter(arguments)
            return add_to([next(remaining) for _ in self.sum_specs], remaining)

        def sum_clients(*arguments: tf.Tensor) -> Tensors:
            return add_to(start(), iter(arguments))

        def add_to(total: Tensors, remaining: Iterator[tf.Tensor]) -> Tensors:
            lists = [next(remaining) for _ in self._value_specs]
            num_clients, *broadcast = remaining

            def add(index: tf.Tensor, *total: tf.Tensor) -> list[tf.Tensor]:
                values = [
                    _element(tensors, index, spec)
                    for tensors, spec in zip(lists, self._value_specs, strict=True)
                ]
                # Imported graphs take tensors of the loop's graph only.
                shared = [tf.identity(tensor) for tensor in broadcast]
                total = add_client(list(total), values, shared)
                for tensor, spec in zip(total, self.sum_specs, strict=True):
                    tensor.set_shape(spec.shape)
                return [index + 1, *total]

            _, *total = tf.while_loop(
                lambda index, *_: index < num_clients,
                add,
                [tf.constant(0), *total],
                shape_invariants=[tf.TensorShape([]), *(spec.shape for spec in self.sum_specs)],
                parallel_iterations=1 if self.is_large else _CLIENTS_AT_ONCE,
            )
            return total

        def add_sum(*arguments: tf.Tensor) -> Tensors:
            one, other = arguments[: len(self.sum_specs)], arguments[len(self.sum_specs) :]
            plain = merge(*one[:num_plain], *other[:num_plain])
            return [*plain, *_added(one[num_plain:], other[num_plain:])]

        lists_and_number = [
            *[tf.TensorSpec([], tf.variant)] * len(self._value_specs),
            tf.TensorSpec([], tf.int32),
        ]
        self._zero = traced(start, [], device=CPU)
        # A sum that begins within the function is not kept by its caller meanwhile.
        specs = [*lists_and_number, *broadcast_specs]
        self._sum_clients = traced(sum_clients, specs, device=CPU)
        self._trace_add_clients = lambda: traced(add_clients, [*self.sum_specs, *specs], device=CPU)
        self._add_sum = traced(add_sum, self.sum_specs * 2, device=CPU)

    @functools.cached_property
    def _add_clients(self) -> Callable[..., Tensors]:
        """Function for the clients after the first call's; few rounds have so many."""
        return self._trace_add_clients()

    def zero(self) -> Tensors:
        """Returns the sum of no clients."""
        return self._zero()

    def add(
        self,
        total: Tensors | None,
        clients: Sequence[Sequence[tf.Tensor]],
        broadcast: Sequence[tf.Tensor],
    ) -> Tensors:
        """Runs clients' work and adds up the results in order; None is the sum of no clients."""
        with tf.device(CPU):
            lists = [
                _tensor_list([values[i] for values in clients], spec.dtype)
                for i, spec in enumerate(self._value_specs)
            ]
            arguments = [*lists, tf.constant(len(clients)), *broadcast]
            if total is None:
                return self._sum_clients(*arguments)
            return self._add_clients(*total, *arguments)

    def merge(self, total: Tensors, other: Tensors) -> Tensors:
        """Adds two sums."""
        return self._add_sum(*total, *other)


def _edit_work(graph_def: tf.compat.v1.GraphDef) -> None:
    large_fills.compute(graph_def)
    reductions.unroll(graph_def)


def _tensor_list(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Packs tensors of any shapes in one variant."""
    made = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
    for tensor in tensors:
        made = tf.raw_ops.TensorListPushBack(input_handle=made, tensor=tensor)
    return made


def _element(tensors: tf.Tensor, index: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns one of the tensors of `_tensor_list`."""
    shape = -1 if spec.shape.rank is None else [-1 if d is None else d for d in spec.shape]
    element = tf.raw_ops.TensorListGetItem(
        input_handle=tensors,
        index=index,
        element_shape=tf.constant(shape, tf.int32),
        element_dtype=spec.dtype,
    )
    return tf.ensure_shape(element, spec.shape)


def traced(
    function: Callable[..., Tensors], specs: Sequence[tf.TensorSpec], *, device: str | None = None
) -> Callable[..., Tensors]:
    """Traces a function of tensors once. TensorFlow chooses the device if it is None."""

    def placed(*arguments: tf.Tensor) -> Tensors:
        with tf.device(device):
            return function(*arguments)

    return tf.function(placed, input_signature=list(specs), autograph=False).get_concrete_function()


def local(graph: graph_function.GraphFunction) -> Callable[..., Tensors]:
    """Traces a graph as a function of flat tensors, on the CPU."""
    return traced(graph.importer(edit=large_fills.compute), graph.input_specs, device=CPU)


def _as_summand(value: tf.Tensor, secure_sum: federated_round.SecureSum) -> tf.Tensor:
    """Casts a client's integers to int64, whose sums are exact below 2^63, and checks them."""
    value = tf.cast(value, tf.int64)
    if secure_sum.largest_entry is None:
        return value
    check = tf.debugging.assert_less_equal(
        value,
        tf.constant(secure_sum.largest_entry, tf.int64),
        message="client value larger than maximum specified for secure sum",
    )
    with tf.control_dependencies([check]):
        return tf.identity(value)


def _added(one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]) -> Tensors:
    return [a + b for a, b in zip(one, other, strict=True)]


class NoWorkersError(ConnectionError):
    """No worker answers, or workers were lost too often in a round."""


class ClientRunner(abc.ABC):
    """Runner of the clients of a round, which adds up their results."""

    @abc.abstractmethod
    def sum(
        self,
        functions: ClientFunctions,
        clients: Sequence[Callable[[], Sequence[tf.Tensor]]],
        broadcast: Sequence[tf.Tensor],
    ) -> Tensors:
        """Adds up the results of all clients of a round, chunk by chunk.

        Args:
          functions: Functions of the clients' work and its sums.
          clients: Functions that make the values of each client.
          broadcast: Tensors that all clients receive.

        Returns:
          The sum.

        Raises:
          tf.errors.OpError: If a client's computation fails.
          NoWorkersError: If clients run in worker processes, and there are none.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stops the runner's threads or workers; no round can follow."""


class ThreadedClients(ClientRunner):
    """Runner of clients in threads of this process; each thread computes one chunk at a time.

    Memory does not grow with the number of clients. Each thread holds the data of 16 clients and
    two sums, and computes two clients at a time. With a model of a million weights or more, a
    thread computes one client at a time, and there are no more threads than cores.
    """

    def __init__(self, num_threads: int | None = None):
        """Sets up a pool, which starts its threads when they are needed.

        `num_threads` chunks are computed at the same time. Default: one more than cores, because a
        thread that runs Python leaves its core idle.
        """
        self._num_cores = len(os.sched_getaffinity(0)) if num_threads is None else num_threads
        if num_threads is None:
            num_threads = self._num_cores + 1
        self._num_ahead = 2 * num_threads
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, "clients")

    @override
    def sum(self, functions, clients, broadcast):
        total = None
        partials = self._sums_of_chunks(functions, clients, broadcast)
        with contextlib.closing(partials):
            for partial in partials:
                total = partial if total is None else functions.merge(total, partial)
                del partial  # Its memory is needed for the next one.
        return functions.zero() if total is None else total

    def _sums_of_chunks(
        self,
        functions: ClientFunctions,
        clients: Sequence[Callable[[], Sequence[tf.Tensor]]],
        broadcast: Sequence[tf.Tensor],
    ) -> Iterator[Tensors]:
        """Yields the sums of the chunks in their order, while the next ones are computed."""
        is_over = threading.Event()
        num_ahead = self._num_cores if functions.is_large else self._num_ahead

        def add_up(chunk: range) -> Tensors:
            total: Tensors | None = None
            for first in range(chunk.start, chunk.stop, _CLIENTS_A_CALL):
                if is_over.is_set():
                    break
                some = clients[first : min(first + _CLIENTS_A_CALL, chunk.stop)]
                total = functions.add(total, [make_values() for make_values in some], broadcast)
            return functions.zero() if total is None else total

        remaining = iter(chunks(len(clients)))
        waiting: collections.deque[concurrent.futures.Future[Tensors]] = collections.deque()
        try:
            while True:
                for chunk in itertools.islice(remaining, num_ahead - len(waiting)):
                    waiting.append(self._pool.submit(add_up, chunk))
                if not waiting:
                    return
                waiting[0].result()
                yield waiting.popleft().result()  # No name here keeps it after that.
        finally:  # Nothing goes on in the background after a failure or Ctrl-C.
            is_over.set()
            for future in waiting:
                future.cancel()
            concurrent.futures.wait(waiting)

    @override
    def close(self):
        self._pool.shutdown()
