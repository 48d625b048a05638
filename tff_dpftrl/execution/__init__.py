"""Where rounds run: compiled in this process, or in TFF's contexts.

A program chooses once, at its entry point, where its computations run:

    with tff_dpftrl.execution.local():
        ...  # Build processes and run rounds.

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "ClientRunner": "client_part",
    "CompiledProcess": "compiled_process",
    "NotCompilableError": "compiled_process",
    "NoWorkersError": "client_part",
    "RayClients": "ray_clients",
    "ThreadedClients": "client_part",
    "check_secure_sums": "contexts",
    "compile_process": "compiled_process",
    "compiled_only": "contexts",
    "install_fast_state_transfer": "state_transfer",
    "limit_operation_threads": "operation_threads",
    "local": "contexts",
    "secure_sum_simulation": "contexts",
    "uninstall_fast_state_transfer": "state_transfer",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
