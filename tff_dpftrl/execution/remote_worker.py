"""The connection to one worker of TFF: it is made, it is watched, it is lost, it is made again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import tensorflow_federated as tff

from tff_dpftrl.execution.tff_private import executor_pb2, executor_pb2_grpc, tensorflow_computation

_LARGEST_MESSAGE = 2**31 - 1  # Bytes; a limit of protocol buffers.
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),  # So that a probe is a connection of its own.
)
_MEANS_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,  # Another process at the address, which knows nothing.
)
_SECONDS_TO_CONNECT = 5.0
_SECONDS_BETWEEN_PROBES = 5.0
_PROBES_UNTIL_LOST = 2
_SECONDS_TO_DISPOSE = 5.0


class WorkerLostError(Exception):
    """The worker does not answer, or not in time; another may do its work."""


class RemoteWorker:
    """One worker, for one thread at a time; `connect` and `abandon` are for any.

    Attributes:
      address: "host:port".
    """

    def __init__(self, address: str, call_seconds: float):
        """Connects to nothing yet.

        Args:
          address: "host:port".
          call_seconds: How long one call may take before the worker counts as lost.
        """
        self.address = address
        self._call_seconds = call_seconds
        self._connection: _Connection | None = None
        self._connecting = threading.Lock()

    @property
    def is_connected(self) -> bool:
        """Whether the worker answered when it was asked last."""
        return self._connection is not None

    def connect(self) -> bool:
        """Connects unless that has been done, and returns whether the worker answers."""
        with self._connecting:
            if self._connection is None and _answers(self.address):
                self._connection = _Connection(self.address, self._call_seconds)
            return self.is_connected

    def run(self, comp: tff.framework.ConcreteComputation, arg: Any) -> Any:
        """Runs a computation there and returns its result.

        Args:
          comp: A computation that needs no more compilation.
          arg: Its argument.

        Raises:
          WorkerLostError: If the worker is lost before it is done; it is no longer
            connected then.
        """
        connection = self._connection
        if connection is None:
            raise WorkerLostError("it is not connected")
        try:
            with connection.watched():
                return connection.context.invoke(comp, arg)
        except WorkerLostError:
            connection.close()
            if self._connection is connection:  # The next round may have made another.
                self._connection = None
            raise

    def abandon(self) -> None:
        """Disconnects at once; a call under way ends with `WorkerLostError`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Frees what the worker keeps for this process, and disconnects."""
        if self._connection is not None:
            self._connection.dispose()
        self.abandon()


def _answers(address: str) -> bool:
    """Whether a server of gRPC accepts a new connection there, within seconds."""
    with grpc.insecure_channel(address, _CHANNEL_OPTIONS) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_SECONDS_TO_CONNECT)
        except grpc.FutureTimeoutError:
            return False
    return True


class _Connection:
    """A channel to a process, and a context of TFF's on it."""

    def __init__(self, address: str, call_seconds: float):
        self._address = address
        self._stub = _Stub(address, call_seconds)
        self._executors: list[tff.framework.RemoteExecutor] = []
        factory = tff.framework.ResourceManagingExecutorFactory(self._executor)
        self.context = tff.framework.SyncExecutionContext(
            factory, transform_args=tensorflow_computation.transform_args
        )

    def _executor(self, cardinalities: Any) -> tff.framework.RemoteExecutor:
        # TFF would let the worker keep up to 20 values, models and data, that are used no more.
        executor = tff.framework.RemoteExecutor(self._stub, dispose_batch_size=1)
        executor.set_cardinalities(cardinalities)
        self._executors.append(executor)
        return executor

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Gives the calls within the block up if the worker stops to answer probes."""
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        failures = 0
        while not over.wait(_SECONDS_BETWEEN_PROBES):
            failures = 0 if _answers(self._address) else failures + 1
            if failures == _PROBES_UNTIL_LOST and not over.is_set():
                self._stub.close("it stopped answering")
                return

    def dispose(self) -> None:
        for executor in self._executors:
            executor.close()

    def close(self) -> None:
        self._stub.close("the connection was closed")


class _Stub(tff.framework.RemoteExecutorStub):
    """Calls with deadlines, whose failures TFF does not repeat for ever."""

    def __init__(self, address: str, call_seconds: float):
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._group = executor_pb2_grpc.ExecutorGroupStub(self._channel)
        self._call_seconds = call_seconds
        self._why_closed: str | None = None

    def close(self, why: str) -> None:
        """Ends all calls."""
        if self._why_closed is None:
            self._why_closed = why
            self._channel.close()

    @property
    def is_ready(self) -> bool:
        return self._why_closed is None

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._call_seconds)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed.
            if self._why_closed is not None:
                raise WorkerLostError(self._why_closed) from error
            if isinstance(error, grpc.RpcError) and error.code() in _MEANS_LOST:
                raise WorkerLostError(f"{error.code().name}: {error.details()}") from error
            raise

    def get_executor(self, request):
        return self._call(self._group.GetExecutor, request)

    def create_value(self, request):
        return self._call(self._group.CreateValue, request)

    def create_call(self, request):
        return self._call(self._group.CreateCall, request)

    def create_struct(self, request):
        return self._call(self._group.CreateStruct, request)

    def create_selection(self, request):
        return self._call(self._group.CreateSelection, request)

    def compute(self, request):
        return self._call(self._group.Compute, request)

    def dispose(self, request):
        return self._forget(self._group.Dispose, request, executor_pb2.DisposeResponse())

    def dispose_executor(self, request):
        return self._forget(
            self._group.DisposeExecutor, request, executor_pb2.DisposeExecutorResponse()
        )

    def _forget(self, method: Callable[..., Any], request: Any, response: Any) -> Any:
        # Called by the garbage collector too, at any time: a worker that is gone has forgotten.
        if self._why_closed is None:
            with contextlib.suppress(grpc.RpcError, ValueError):
                method(request, timeout=_SECONDS_TO_DISPOSE)
        return response
