"""Where rounds run: compiled in this process, or in TFF's contexts.

A program chooses once, at its entry point, where its computations run:

    with tff_dpftrl.execution.local():
        ...  # Build processes and run rounds.

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tff_dpftrl.execution.allocator import give_back_memory
    from tff_dpftrl.execution.client_part import ClientRunner, NoWorkersError, ThreadedClients
    from tff_dpftrl.execution.compiled_process import (
        CompiledProcess,
        NotCompilableError,
        compile_process,
    )
    from tff_dpftrl.execution.contexts import (
        compiled_only,
        local,
        secure_sum_simulation,
    )
    from tff_dpftrl.execution.operation_threads import limit_operation_threads
    from tff_dpftrl.execution.ray_clients import RayClients
    from tff_dpftrl.execution.secure_sum_check import check_secure_sums

__all__ = [
    "ClientRunner",
    "CompiledProcess",
    "NotCompilableError",
    "NoWorkersError",
    "RayClients",
    "ThreadedClients",
    "check_secure_sums",
    "compile_process",
    "compiled_only",
    "give_back_memory",
    "limit_operation_threads",
    "local",
    "secure_sum_simulation",
]

# Module that defines a name.
_MODULE_OF = {
    "ClientRunner": "execution.client_part",
    "CompiledProcess": "execution.compiled_process",
    "NotCompilableError": "execution.compiled_process",
    "NoWorkersError": "execution.client_part",
    "RayClients": "execution.ray_clients",
    "ThreadedClients": "execution.client_part",
    "check_secure_sums": "execution.secure_sum_check",
    "compile_process": "execution.compiled_process",
    "compiled_only": "execution.contexts",
    "give_back_memory": "execution.allocator",
    "limit_operation_threads": "execution.operation_threads",
    "local": "execution.contexts",
    "secure_sum_simulation": "execution.contexts",
}


if not TYPE_CHECKING:  # A checker that sees it takes every misspelt name for a good one.

    def __getattr__(name: str):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"tff_dpftrl.{_MODULE_OF[name]}"), name)
