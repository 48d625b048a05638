"""Execution contexts of TFF, which only a program's entry point enters.

No builder of this package sets TFF's context. Each function here is a context
manager, and restores the earlier context at the end of the `with` block.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pathlib
import signal
from collections.abc import Iterator

from tff_dpftrl.execution import tff_names

_WORKER = "/tensorflow_federated/data/worker_binary"


@contextlib.contextmanager
def local() -> Iterator[tff_names.SyncContext]:
    """Runs computations in one worker process on this machine, TFF's default; no secure sums."""
    with _entered(tff_names.create_sync_local_cpp_execution_context()) as context:
        yield context


@contextlib.contextmanager
def secure_sum_simulation() -> Iterator[tff_names.SyncContext]:
    """Runs computations in one local worker process that simulates secure sums.

    The results are those of a secure sum, but the worker computes them in the clear, without
    cryptography: for simulations only, where the operator holds the clients' data anyway.
    """
    with _entered(tff_names.create_sync_test_cpp_execution_context()) as context:
        yield context


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Keeps TFF from running computations, for programs that compile their processes.

    Processes, with secure sums too, are built here and given to `compile_process`; no worker
    is started. Direct calls of computations are refused.
    """
    clean_up_at_exit()
    with tff_names.get_context_stack().install(_CompiledOnly()):
        yield


class _CompiledOnly(tff_names.SyncContext):
    def invoke(self, comp, arg):
        """Refuses to run anything."""
        del comp, arg
        raise RuntimeError(
            "This program runs compiled processes only, and this computation is not compiled: give "
            "its process to tff_dpftrl.compile_process, or enter tff_dpftrl.execution.local()."
        )


@functools.cache
def clean_up_at_exit() -> None:
    """Ends TFF's workers and lets go of its default context when the interpreter exits.

    Else a worker would hold the program's standard output open, and a pipe from it would never end;
    and the context's destructor would fail with a printed traceback once TFF's modules are gone.
    Workers of other processes, forks of this one included, are left alone. Ending them needs
    Linux's /proc.
    """
    stack = tff_names.get_context_stack()
    # The context goes last: its destructor waits for the worker.
    atexit.register(lambda: stack.set_default_context(_CompiledOnly()))
    atexit.register(_end_workers)


def _end_workers() -> None:
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            # The parent is the second field after the name, which may hold spaces.
            parent = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and os.readlink(process / "exe").endswith(_WORKER):
                os.kill(int(process.name), signal.SIGKILL)  # TFF's destructor reaps it.
        except OSError:  # Ended by itself, or another user's.
            continue


@contextlib.contextmanager
def _entered(context: tff_names.SyncContext) -> Iterator[tff_names.SyncContext]:
    clean_up_at_exit()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # As in a script's background job. A worker would inherit that, and TFF, which ends workers
        # by this signal, would wait for it for ever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with tff_names.get_context_stack().install(context):
        yield context
