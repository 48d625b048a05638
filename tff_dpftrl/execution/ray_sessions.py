"""Starting Ray on this machine, and joining a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator

from tff_dpftrl.execution import ray_address

try:
    import ray
except ImportError as import_error:
    raise ModuleNotFoundError(
        "Ray is not installed: pip install 'tff_dpftrl[distributed]'.", name="ray"
    ) from import_error

_SECONDS_TO_ANSWER = 10.0


def start(num_cpus: int, object_store_memory: int, temp_dir: str) -> None:
    """Starts Ray on this machine, for this process only, on loopback.

    `temp_dir` is a short path, since names of sockets have to be short.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise it reports on the terminal that its metrics are not collected.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with _undisturbed():
        ray.init(
            "local",
            num_cpus=num_cpus,
            object_store_memory=object_store_memory,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=temp_dir,
        )


def join(address: str) -> None:
    """Connects this process to a cluster."""
    ray_address.check(address)
    if address != "auto":  # Ray itself would try for many minutes.
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER).close()
        except (OSError, UnicodeError) as error:  # The latter of a name that is none of a host.
            raise ConnectionError(
                f"No Ray cluster answers at {address!r} ({error}): start one with 'ray start'."
            ) from error
    try:
        with _undisturbed():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except RuntimeError as error:  # Another version of Ray or Python, for example.
        raise ConnectionError(f"Ray at {address!r} cannot be joined: {error}") from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the program's SIGTERM handler, which Ray replaces, and silences a warning."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():  # About a future treatment of GPUs by Ray.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
