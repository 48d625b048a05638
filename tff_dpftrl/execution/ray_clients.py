"""Clients in the processes of Ray, on this machine or on a cluster.

A worker receives the clients' computation once, and in a round the broadcast and whole chunks
of clients, which it adds up. The chunks are added up here. Noise and all computations of the
server stay in this process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.execution import client_part, client_worker, ray_sessions

ray = ray_sessions.ray  # Its import explains what to do where Ray is not installed.

_MAX_LOSSES = 3  # Lost workers during one chunk, or for each worker that starts.
_CHUNKS_AHEAD = 4  # Chunks per worker that are computed or in flight, and not yet added up.
_TICK = 1.0  # Seconds between two checks of the timeouts.
_RESUME = "The state before the round is still valid: start the round again, or resume the run."


class RayClients(client_part.ClientRunner):
    """Runner of clients in worker processes of Ray.

    The sum has the same bits with any number of workers. `ThreadedClients` computes the same bits
    if it runs on the same kind of processor with as many TensorFlow threads. A lost worker does
    not change the sum: other workers compute its chunks again, and a new one takes its place. A
    dataset is sent as it was built. So one that shuffles anew at every iteration starts from its
    first order in every round.

    Example:
      ```
      with tff_dpftrl.execution.RayClients() as clients:
        process = tff_dpftrl.compile_process(process, clients=clients, ...)
      ```

    Anybody who reaches the ports of a Ray cluster can run code on it, and its traffic is not
    encrypted: it needs a separate network. A Ray that is started here listens on loopback
    only.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        address: str | None = None,
        threads_per_worker: int | None = None,
        object_store_memory: int = 2**30,
        start_timeout_seconds: float = 300.0,
        chunk_timeout_seconds: float = 3600.0,
    ):
        """Starts or joins Ray, and begins to start the workers.

        Args:
          num_workers: Number of worker processes; one for each core if None.
          address: Address of a cluster to join, "host:port" or "auto" for one that has a node
            on this machine. If None, Ray is started on this machine, unless the program is
            connected to one already.
          threads_per_worker: Number of threads of one TensorFlow operation of a worker; the
            number in this process if None. One is faster where there is a worker for each
            core, and gives other bits only if an operation is split among threads, such as
            the gradient of a convolution.
          object_store_memory: Size of Ray's shared memory in bytes, if Ray is started.
          start_timeout_seconds: Time without any worker, in seconds, after which a round
            fails.
          chunk_timeout_seconds: Time for one chunk, in seconds, after which a worker counts
            as lost.

        Raises:
          ValueError: If an argument is out of range, or an address is given although the
            program is connected to Ray.
          ConnectionError: If there is no cluster at the address.
        """
        validation.integer("object_store_memory", object_store_memory, minimum=1)
        for name, value in [
            ("num_workers", num_workers),
            ("threads_per_worker", threads_per_worker),
        ]:
            if value is not None:
                validation.integer(name, value, minimum=1)
        num_cores = len(os.sched_getaffinity(0))
        self._temp_dir = None
        self._connected = not ray.is_initialized()
        if self._connected and address is None:
            # Not the usual place for temporary files: names of sockets have to be short.
            self._temp_dir = tempfile.mkdtemp(prefix="tff_dpftrl-ray-", dir="/tmp")
            ray_sessions.start(num_workers or num_cores, object_store_memory, self._temp_dir)
        elif self._connected:
            ray_sessions.join(address)
        elif address is not None:
            raise validation.UsageError(
                f"address must be None, got {address!r}: the program is connected to Ray already, "
                "call ray.shutdown() first."
            )
        self._num_workers = num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._num_threads = (
            threads_per_worker
            or tf.config.threading.get_intra_op_parallelism_threads()
            or num_cores
        )
        self._start_timeout = start_timeout_seconds
        self._chunk_timeout = chunk_timeout_seconds
        self._actor_class = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._workers: list[_Worker] = []
        self._parts: dict[client_part.ClientFunctions, tuple[int, list[ray.ObjectRef]]] = {}
        self._closed = False
        self._start_workers()

    def __enter__(self) -> RayClients:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wait_until_ready(self) -> list[int]:
        """Waits for all workers; a round only waits for the first one.

        It returns their process ids.
        """
        starting = [worker for worker in self._workers if worker.starting is not None]
        try:
            pids = ray.get([worker.starting for worker in starting], timeout=self._start_timeout)
        except ray.exceptions.RayError as error:
            raise client_part.NoWorkersError(f"A Ray worker did not start: {error}") from error
        for worker, pid in zip(starting, pids, strict=True):
            worker.has_started(pid)
        return [worker.pid for worker in self._workers]

    @override
    def sum(self, functions, clients, broadcast):
        """Adds up the results of all clients of a round, chunk by chunk."""
        if self._closed:
            raise validation.UsageError("The workers have been closed: make another RayClients.")
        if not clients:
            return functions.zero()
        key, part = self._send_part(functions)
        shared = ray.put(client_worker.encode(broadcast, "the broadcast"))
        chunks = client_part.chunks(len(clients))

        def call(worker: _Worker, index: int) -> ray.ObjectRef:
            values = [
                client_worker.encode(clients[i](), f"client {i} of the round")
                for i in chunks[index]
            ]
            return worker.actor.sum.remote(key, part, shared, values)

        total = None
        with contextlib.closing(self._in_order(call, len(chunks))) as results:
            for result in results:
                if isinstance(result, client_worker.Failure):
                    raise result.error()
                partial = client_worker.decode(result)
                total = partial if total is None else functions.merge(total, partial)
        return total

    @override
    def close(self):
        """Stops the workers, and Ray if it was started here; a joined cluster goes on."""
        if self._closed:
            return
        self._closed = True
        if ray.is_initialized():
            for worker in self._workers:
                ray.kill(worker.actor)
            if self._connected:
                ray.shutdown()
        self._workers.clear()
        self._parts.clear()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _send_part(self, functions: client_part.ClientFunctions) -> tuple[int, list[ray.ObjectRef]]:
        """Stores the clients' computation in Ray once; returns its key and its reference."""
        if functions not in self._parts:
            # In a list, Ray does not resolve it for every call.
            self._parts[functions] = len(self._parts), [ray.put(functions.part)]
        return self._parts[functions]

    def _start_workers(self) -> None:
        """Starts the workers that are missing."""
        while len(self._workers) < self._num_workers:
            actor = self._actor_class.remote(self._num_threads)
            self._workers.append(_Worker(actor, starting=actor.pid.remote()))

    def _in_order(
        self, call: Callable[[_Worker, int], ray.ObjectRef], num_calls: int
    ) -> Iterator[Any]:
        """Yields the results of calls in their order; calls of a lost worker are repeated."""
        waiting = list(range(num_calls))  # A heap.
        results: dict[int, Any] = {}
        losses: collections.Counter[int | None] = collections.Counter()
        try:
            for index in range(num_calls):
                while index not in results:
                    self._start_workers()
                    self._assign(call, waiting, index + _CHUNKS_AHEAD * self._num_workers)
                    for worker, error in self._receive(results):
                        waiting += worker.calls.values()
                        heapq.heapify(waiting)
                        self._drop(worker, losses, error)
                yield results.pop(index)
        finally:  # Calls that have not begun are cancelled after a failure or Ctrl-C.
            for worker in self._workers:
                for reference in worker.calls:
                    ray.cancel(reference)
                worker.calls.clear()

    def _assign(
        self, call: Callable[[_Worker, int], ray.ObjectRef], waiting: list[int], end: int
    ) -> None:
        """Assigns chunks in their order to workers that are free, or will be soon."""
        started = [worker for worker in self._workers if worker.starting is None]
        while started and waiting and waiting[0] < end:
            worker = min(started, key=lambda worker: len(worker.calls))
            # The next chunk arrives while a worker computes. The last chunks go to the workers
            # that are free first.
            if len(worker.calls) >= (2 if len(waiting) > len(started) else 1):
                return
            if not worker.calls:
                worker.since = time.monotonic()
            index = heapq.heappop(waiting)
            worker.calls[call(worker, index)] = index

    def _receive(self, results: dict[int, Any]) -> list[tuple[_Worker, Exception]]:
        """Waits a moment for an answer, and returns lost workers with their errors."""
        worker_of = {call: worker for worker in self._workers for call in worker.pending()}
        answered, _ = ray.wait(list(worker_of), timeout=_TICK)
        now = time.monotonic()
        for reference in answered:
            worker = worker_of[reference]
            try:
                result = ray.get(reference)
            except ray.exceptions.RayTaskError:  # Not a loss but an exception in Python.
                raise
            except ray.exceptions.RayError as error:
                if getattr(error, "actor_init_failed", False):
                    raise client_part.NoWorkersError(
                        f"A Ray worker cannot start: {error}"
                    ) from error
                return [(worker, error)]
            worker.since = now
            if worker.starting is not None:
                worker.has_started(result)
            else:
                results[worker.calls.pop(reference)] = result
        if all(
            worker.starting is not None and now - worker.since > self._start_timeout
            for worker in self._workers
        ):
            raise client_part.NoWorkersError(
                f"No Ray worker has started in {self._start_timeout} s: check whether the cluster "
                f"has a free CPU for each of {self._num_workers} workers. {_RESUME}"
            )
        return [
            (worker, TimeoutError(f"it took more than {self._chunk_timeout} s for a chunk."))
            for worker in self._workers
            if worker.calls and now - worker.since > self._chunk_timeout
        ]

    def _drop(
        self, worker: _Worker, losses: collections.Counter[int | None], error: Exception
    ) -> None:
        """Removes a lost worker; raises an error if workers are lost too often."""
        ray.kill(worker.actor)
        self._workers.remove(worker)
        # The first of its calls was under way; None is a worker that was still starting.
        chunk = next(iter(worker.calls.values()), None)
        losses[chunk] += 1
        reason = str(error).strip().splitlines()[-1]  # The lines before are Ray's name of it.
        limit = _MAX_LOSSES if chunk is not None else _MAX_LOSSES * self._num_workers
        if losses[chunk] > limit:
            what = "the start of workers" if chunk is None else f"chunk {chunk} of the clients"
            raise client_part.NoWorkersError(
                f"A Ray worker was lost {losses[chunk]} times during {what}, the last time "
                f"because: {reason} {_RESUME}"
            ) from error
        warnings.warn(
            f"A Ray worker was lost: others repeat its chunks, and a new one is started. {reason}",
            stacklevel=3,
        )


@dataclasses.dataclass(eq=False)
class _Worker:
    """State of a worker, as this process records it.

    `starting` is None once the worker has started. `calls` has the indices of the chunks that it
    has to compute, in this order, by their calls. `since` is the time, on the monotonic clock, when
    it began to start or with its first chunk.
    """

    actor: ray.actor.ActorHandle
    starting: ray.ObjectRef | None
    calls: dict[ray.ObjectRef, int] = dataclasses.field(default_factory=dict)
    since: float = dataclasses.field(default_factory=time.monotonic)
    pid: int | None = None

    def has_started(self, pid: int) -> None:
        """Records the worker's process id, the answer to `starting`."""
        self.starting, self.pid = None, pid

    def pending(self) -> list[ray.ObjectRef]:
        """Returns the calls that the worker has not answered."""
        return [*self.calls] if self.starting is None else [self.starting]


class _Actor(client_worker.ClientWorker):
    """Worker in a separate process."""

    def __init__(self, num_threads: int):
        """Sets up TensorFlow with this number of threads for one operation."""
        super().__init__()
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)

    def pid(self) -> int:
        """Returns the id of this process, once it has loaded TensorFlow."""
        return os.getpid()

    @override
    def sum(self, key, part, broadcast, clients):
        """Runs the clients of a chunk; `part` is a list with Ray's reference of the part."""
        return super().sum(key, lambda: ray.get(part[0]), broadcast, clients)
