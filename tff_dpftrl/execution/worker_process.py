"""Starts and ends one worker of TFF: the process that runs computations for others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator

import grpc

from tff_dpftrl.execution import loopback_port, worker_watchdog

_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 10.0


class WorkerProcess:
    """A worker that is ready.

    Attributes:
      address: "host:port" for `remote_workers`, as this machine calls itself.
      pid: Id of the process.
    """

    def __init__(self, address: str, process: subprocess.Popen[bytes]):
        self.address = address
        self.pid = process.pid
        self._process = process

    def wait(self) -> int:
        """Waits for its end and returns its status, negative for a signal."""
        return self._process.wait()


@contextlib.contextmanager
def serve(
    port: int = 0, *, trust_network: bool = False, max_concurrent_calls: int = -1
) -> Iterator[WorkerProcess]:
    """Runs a worker of TFF until the block is left, or until this process ends, however.

    TFF's worker has no encryption and no authentication: whoever reaches it can run
    TensorFlow operations, which read and write files, as this user. It is kept to
    loopback addresses (see `loopback_port`), unless the network is trusted.

    Args:
      port: Free TCP port, or 0 for any.
      trust_network: Lets every machine that can reach this one use the worker.
      max_concurrent_calls: How many clients train at a time, at most; not limited by
        default. Each takes memory for its model.

    Yields:
      The worker, once it answers.

    Raises:
      ModuleNotFoundError: If TFF is not installed.
      OSError: If the port is in use, if the worker cannot be kept to loopback addresses
        here and the network is not trusted, or if it does not start.
    """
    binary = _binary()
    with contextlib.ExitStack() as stack:
        if trust_network:
            host, port = socket.gethostname(), loopback_port.free(port)
        else:
            with _explained():
                host, port = "127.0.0.1", stack.enter_context(loopback_port.guarded(port))
        process = stack.enter_context(_running(binary, port, max_concurrent_calls))
        _wait_until_ready(process, port)
        if not trust_network:
            with _explained():
                loopback_port.check(port)
        yield WorkerProcess(f"{host}:{port}", process)


def _binary() -> pathlib.Path:
    # Without importing TFF, which takes seconds.
    spec = importlib.util.find_spec("tensorflow_federated")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "No module named 'tensorflow_federated'", name="tensorflow_federated"
        )
    return pathlib.Path(spec.origin).parent / "data" / "worker_binary"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except loopback_port.CannotGuardError as error:
        raise OSError(
            f"TFF's worker cannot be kept to loopback addresses on this machine ({error}): it "
            "would let everybody who reaches this machine run code as you. If the network is "
            "trusted, say trust_network=True (--trust-network)"
        ) from error


@contextlib.contextmanager
def _running(
    binary: pathlib.Path, port: int, max_concurrent_calls: int
) -> Iterator[subprocess.Popen[bytes]]:
    worker_watchdog.start()
    process = subprocess.Popen(
        [
            str(binary),
            f"--port={port}",
            f"--max_concurrent_computation_calls={max_concurrent_calls}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # So that a pipe after this process ends with it.
        env={"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the worker.
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ready = grpc.channel_ready_future(channel)
        while process.poll() is None and time.monotonic() < deadline:
            try:
                return ready.result(timeout=0.1)
            except grpc.FutureTimeoutError:
                continue
    status = process.poll()
    if status is None:
        raise OSError(f"TFF's worker did not answer within {_SECONDS_TO_START:g} seconds")
    raise OSError(f"TFF's worker ended with status {status} before it was ready")
