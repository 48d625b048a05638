"""One line in place of a gRPC traceback, where TFF's executor lacks the secure sums of a round."""

from __future__ import annotations

import functools
from typing import Any

import grpc
import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names

_MISSING = (
    "TFF's current execution context cannot run secure sums: compile the process with "
    "tff_dpftrl.compile_process, or run it within 'with "
    "tff_dpftrl.execution.secure_sum_simulation():'. Both compute the same sums in the clear, for "
    "simulations."
)
_SECURE = b"federated_secure_"  # In the names of TFF's secure intrinsics.

_original_invoke = tff_names.SyncExecutionContext.invoke


def check_secure_sums() -> None:
    """Tries a secure sum in TFF's current execution context.

    Contexts other than TFF's synchronous ones are accepted without a trial, such as asynchronous
    ones and `compiled_only`.

    Raises:
      ValueError: If the context, like TFF's default one, has no secure sums.
    """
    context = tff_names.get_context_stack().current
    if isinstance(context, tff_names.SyncExecutionContext) and not _has_secure_sums(context):
        raise validation.UsageError(_MISSING)


def explain_missing_secure_sums() -> None:
    """Makes every synchronous TFF context of this process say that it lacks secure sums.

    A computation that fails for this reason raises the error of `check_secure_sums`. Nothing
    changes for computations that succeed or have no secure sums. Repeated calls do nothing.
    """
    tff_names.SyncExecutionContext.invoke = _invoke


def _invoke(context: tff_names.SyncExecutionContext, comp: Any, arg: Any) -> Any:
    """Replaces `SyncExecutionContext.invoke`."""
    try:
        return _original_invoke(context, comp, arg)
    except grpc.RpcError:
        content = tff_names.ConcreteComputation.get_proto(comp).SerializeToString()
        if _SECURE not in content or _has_secure_sums(context):
            raise
    raise validation.UsageError(_MISSING)  # Outside of `except`, so that gRPC's is not shown.


def _has_secure_sums(context: tff_names.SyncExecutionContext) -> bool:
    try:
        _original_invoke(context, _trial(), [1, 2])
    except grpc.RpcError:
        return False
    return True


@functools.cache
def _trial() -> tff_names.Computation:
    @tff_names.federated_computation(tff_names.FederatedType(np.int32, tff_names.CLIENTS))
    def secure_sum(value):
        return tff_names.federated_secure_modular_sum(value, 8)

    return secure_sum
