"""Execution contexts of TFF, which only a program's entry point enters.

No builder of this package sets TFF's context. Each function here is a context
manager, and restores the earlier context at the end of the `with` block. Entering one
also starts the watchdog of TFF's workers and the faster transfer of state.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Iterator

from tff_dpftrl.execution import state_transfer, tff_names, worker_watchdog


@contextlib.contextmanager
def local() -> Iterator[tff_names.SyncContext]:
    """Runs computations in one worker process on this machine, TFF's default.

    It has no secure sums.

    Yields:
      TFF's context.
    """
    with _entered(tff_names.create_sync_local_cpp_execution_context()) as context:
        yield context


@contextlib.contextmanager
def secure_sum_simulation() -> Iterator[tff_names.SyncContext]:
    """Runs computations in one local worker process that simulates secure sums.

    The results are those of a secure sum, but the worker computes them in the clear,
    without cryptography: for simulations only, where the operator holds the clients' data
    anyway.

    Yields:
      TFF's context.
    """
    with _entered(tff_names.create_sync_test_cpp_execution_context()) as context:
        yield context


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Keeps TFF from running computations, for programs that compile their processes.

    Processes, with secure sums too, are built here and given to `compile_process`; no worker
    is started. Direct calls of computations are refused.
    """
    let_go_at_exit()
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
def let_go_at_exit() -> None:
    """Lets go of TFF's default context when the interpreter exits.

    Its destructor would fail with a printed traceback once TFF's modules are gone.
    """
    stack = tff_names.get_context_stack()
    atexit.register(lambda: stack.set_default_context(_CompiledOnly()))


@contextlib.contextmanager
def _entered(context: tff_names.SyncContext) -> Iterator[tff_names.SyncContext]:
    """Installs a context, with the watchdog and the faster transfer of state.

    Args:
      context: Context to install.

    Yields:
      The same context.
    """
    let_go_at_exit()
    worker_watchdog.start()
    state_transfer.install_fast_state_transfer()
    with tff_names.get_context_stack().install(context):
        yield context
