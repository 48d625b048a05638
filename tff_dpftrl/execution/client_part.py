"""The clients' part of a round: their work, and sums of it in an order that is fixed.

Floating-point sums depend on their order. Here it depends on the number of clients only:
they are cut into `chunks`, the clients of a chunk are added one after the other, and then
the chunks are. Whoever computes a client or a chunk, in however many threads or processes,
the result has the same bits.

Needs TensorFlow only: a `ClientPart` is plain data that can be sent to another process.
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from tff_dpftrl.execution import graph_function

Tensors: TypeAlias = list[tf.Tensor]
"""The leaves of one value, in TFF's order."""

CPU = "/CPU:0"
"""Where everything is added up, and noised: no reduced precision there."""

_MAX_CHUNKS = 64
_MIN_CLIENTS = 4


def chunks(num_clients: int) -> list[range]:
    """Which clients are added up first, before their sums are.

    Args:
      num_clients: Number of clients of the round.

    Returns:
      Consecutive ranges of positions, at most 64 of them; all but the last one are of the
      same size, at least 4 clients.
    """
    size = max(_MIN_CLIENTS, -(-num_clients // _MAX_CHUNKS))
    return [range(i, min(i + size, num_clients)) for i in range(0, num_clients, size)]


@dataclasses.dataclass(frozen=True)
class ClientPart:
    """What clients compute and how it is added up, as graphs.

    Attributes:
      data: From a client's tensors to its datasets (variants); None if a client's values
        are what `work` takes.
      work: From a client's values, then what is broadcast, to a client's result: what
        `accumulate` takes, then what is summed securely.
      zero: The sum of nothing, without what is summed securely.
      accumulate: From a sum and a client's result to their sum.
      merge: From two sums to their sum.
      num_broadcast: Number of tensors that are broadcast.
      bounds: For each tensor that is summed securely, the largest entry that a client may
        send, or None for a sum modulo some number.
    """

    data: graph_function.GraphFunction | None
    work: graph_function.GraphFunction
    zero: graph_function.GraphFunction
    accumulate: graph_function.GraphFunction
    merge: graph_function.GraphFunction
    num_broadcast: int
    bounds: tuple[int | None, ...]


class ClientFunctions:
    """A client part, traced in this process.

    A client's work runs where TensorFlow puts it, on a GPU if it sees one.
    """

    def __init__(self, part: ClientPart):
        """Traces the graphs, which takes a second or so.

        Args:
          part: The clients' part of a process.

        Raises:
          graph_function.UnsupportedGraphError: If a graph cannot be run in this way.
        """
        self.part = part
        """What it was traced from."""
        split = len(part.work.inputs) - part.num_broadcast
        broadcast_specs = part.work.input_specs[split:]
        num_sums = len(part.zero.outputs)
        data = part.data.importer() if part.data else lambda *values: values
        value_specs = part.data.input_specs if part.data else part.work.input_specs[:split]
        num_values = len(value_specs)
        work, zero, accumulate, merge = (
            graph.importer() for graph in (part.work, part.zero, part.accumulate, part.merge)
        )

        def client(*arguments: tf.Tensor) -> Tensors:
            values, broadcast = arguments[:num_values], arguments[num_values:]
            result = work(*data(*values), *broadcast)
            secure = map(_as_summand, result[num_sums:], part.bounds)
            return [*result[:num_sums], *secure]

        self._client = traced(client, [*value_specs, *broadcast_specs])
        secure_specs = [
            tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self._client.outputs[num_sums:]
        ]
        self.sum_specs = [*part.merge.input_specs[:num_sums], *secure_specs]
        """Specs of the leaves of a sum."""
        result_specs = [*part.accumulate.input_specs[num_sums:], *secure_specs]

        def start() -> Tensors:
            return [*zero(), *(tf.zeros(spec.shape, spec.dtype) for spec in secure_specs)]

        def add_result(*arguments: tf.Tensor) -> Tensors:
            total, result = arguments[: len(self.sum_specs)], arguments[len(self.sum_specs) :]
            plain = accumulate(*total[:num_sums], *result[:num_sums])
            return [*plain, *_added(total[num_sums:], result[num_sums:])]

        def add_sum(*arguments: tf.Tensor) -> Tensors:
            one, other = arguments[: len(self.sum_specs)], arguments[len(self.sum_specs) :]
            plain = merge(*one[:num_sums], *other[:num_sums])
            return [*plain, *_added(one[num_sums:], other[num_sums:])]

        self._zero = traced(start, [], device=CPU)
        self._add_result = traced(add_result, [*self.sum_specs, *result_specs], device=CPU)
        self._add_sum = traced(add_sum, self.sum_specs * 2, device=CPU)

    def zero(self) -> Tensors:
        """The sum of no clients."""
        return self._zero()

    def work(self, values: Sequence[tf.Tensor], broadcast: Sequence[tf.Tensor]) -> Tensors:
        """One client's result.

        Args:
          values: The client's values.
          broadcast: What all clients get.

        Returns:
          Its result, for `add`.

        Raises:
          tf.errors.OpError: If the client's computation fails.
        """
        return self._client(*values, *broadcast)

    def add(self, total: Tensors, result: Tensors) -> Tensors:
        """A sum with one more client's result."""
        return self._add_result(*total, *result)

    def merge(self, total: Tensors, other: Tensors) -> Tensors:
        """The sum of two sums."""
        return self._add_sum(*total, *other)


def traced(
    function: Callable[..., Tensors], specs: Sequence[tf.TensorSpec], *, device: str | None = None
) -> Callable[..., Tensors]:
    """Traces a function of tensors once.

    Args:
      function: From tensors to a list of tensors.
      specs: Shapes and dtypes of its arguments.
      device: Where it runs; where TensorFlow puts it if None.

    Returns:
      The function, as TensorFlow's concrete function.
    """

    def placed(*arguments: tf.Tensor) -> Tensors:
        with tf.device(device):
            return function(*arguments)

    return tf.function(placed, input_signature=list(specs), autograph=False).get_concrete_function()


def _as_summand(value: tf.Tensor, bound: int | None) -> tf.Tensor:
    """A client's integers as int64: sums of them are exact below 2^63."""
    value = tf.cast(value, tf.int64)
    if bound is None:
        return value
    check = tf.debugging.assert_less_equal(
        value,
        tf.constant(bound, tf.int64),
        message="client value larger than maximum specified for secure sum",
    )
    with tf.control_dependencies([check]):
        return tf.identity(value)


def _added(one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]) -> Tensors:
    return [a + b for a, b in zip(one, other, strict=True)]


class NoWorkersError(ConnectionError):
    """No worker answers, or all that tried a share of a round were lost on the way."""


class ClientRunner(abc.ABC):
    """Runs the clients of a round somewhere and adds up their results."""

    @abc.abstractmethod
    def sum(
        self,
        functions: ClientFunctions,
        clients: Sequence[Callable[[], Sequence[tf.Tensor]]],
        broadcast: Sequence[tf.Tensor],
    ) -> Tensors:
        """Adds up the results of all clients of a round, chunk by chunk.

        Args:
          functions: What they compute.
          clients: For each client a function that makes its values.
          broadcast: What they all get.

        Returns:
          The sum.

        Raises:
          tf.errors.OpError: If a client's computation fails.
          NoWorkersError: If clients work elsewhere, and nobody is there to do it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what the runner has started; no round can follow."""


class ThreadedClients(ClientRunner):
    """Runs clients in threads of this process.

    At most two clients for each thread are in memory, however many there are.
    """

    def __init__(self, num_threads: int):
        """Starts no thread yet.

        Args:
          num_threads: Number of clients that work at the same time.
        """
        self._num_ahead = 2 * num_threads
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, "client")

    def sum(self, functions, clients, broadcast):
        """As the base class says."""

        def work(make_values: Callable[[], Sequence[tf.Tensor]]) -> Tensors:
            return functions.work(make_values(), broadcast)

        calls = [functools.partial(work, make_values) for make_values in clients]
        total = None
        with contextlib.closing(_in_order(self._pool, calls, self._num_ahead)) as results:
            for chunk in chunks(len(clients)):
                partial = functions.zero()
                for _ in chunk:
                    partial = functions.add(partial, next(results))
                total = partial if total is None else functions.merge(total, partial)
        return functions.zero() if total is None else total

    def close(self):
        """As the base class says."""
        self._pool.shutdown()


def _in_order(
    pool: concurrent.futures.ThreadPoolExecutor,
    calls: Sequence[Callable[[], Tensors]],
    num_ahead: int,
) -> Iterator[Tensors]:
    """Results of calls in their order, of which at most `num_ahead` are under way."""
    waiting: collections.deque[concurrent.futures.Future[Tensors]] = collections.deque()
    remaining = iter(calls)
    try:
        for _ in calls:
            while len(waiting) < num_ahead and (call := next(remaining, None)) is not None:
                waiting.append(pool.submit(call))
            result = waiting[0].result()
            waiting.popleft()
            yield result
    finally:  # Nothing goes on in the background after a failure or Ctrl-C.
        for future in waiting:
            future.cancel()
        concurrent.futures.wait(waiting)
