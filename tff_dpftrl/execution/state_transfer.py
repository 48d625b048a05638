"""Transfer of a process's state to TFF's worker with fewer copies.

TFF 0.87 runs a computation in a worker process and sends the whole state there and
back in every round. On the way there it builds a protocol buffer from the leaves
up, and so copies a leaf about three times for each level of nesting around it. For
a state of 64 MB this costs more than the noise. Filling one message from the top
down, as here, copies a leaf once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tff_dpftrl.execution import tff_names, tff_private

_original_create_value = tff_private.remote_executor.RemoteExecutor.create_value


def install_fast_state_transfer() -> bool:
    """Makes every TFF context of this process send values as described above.

    It replaces a private method of TFF and therefore does nothing under a release
    of TFF other than the one it was written for. Results do not change.

    Returns:
      Whether it is in effect.
    """
    if not tff_private.is_tested_version():
        return False
    tff_private.remote_executor.RemoteExecutor.create_value = _create_value
    return True


def uninstall_fast_state_transfer() -> None:
    """Undoes `install_fast_state_transfer`."""
    tff_private.remote_executor.RemoteExecutor.create_value = _original_create_value


async def _create_value(executor, value: Any, type_spec: tff_names.Type | None = None):
    """Replaces `RemoteExecutor.create_value` for values that hold no functions."""
    if executor._stream_structs or not isinstance(
        type_spec, tff_names.FederatedType | tff_names.StructType
    ):
        return await _original_create_value(executor, value, type_spec)
    executor._check_has_executor_id()
    request = tff_private.executor_pb2.CreateValueRequest(executor=executor._executor_id)
    _fill(request.value, value, type_spec)
    response = executor._stub.create_value(request)
    return tff_private.remote_executor.RemoteValue(response.value_ref, type_spec, executor)


def _fill(message: tff_private.executor_pb2.Value, value: Any, type_spec: tff_names.Type) -> None:
    """Writes a value into an empty message, without intermediate messages."""
    if isinstance(type_spec, tff_names.FederatedType):
        type_message = tff_private.type_serialization.serialize_type(type_spec).federated
        message.federated.type.CopyFrom(type_message)
        members = [value] if type_spec.all_equal else value
        if not isinstance(members, list):
            raise TypeError(f"A value at the clients must be a list, got {type(value)}.")
        for member in members:
            _fill(message.federated.value.add(), member, type_spec.member)
    elif isinstance(type_spec, tff_names.StructType):
        message.struct.SetInParent()
        elements = list(tff_names.iter_elements(tff_names.from_container(value)))
        if len(elements) != len(type_spec):
            raise TypeError(f"A value with {len(elements)} elements cannot be a {type_spec}.")
        for (name, element_type), (_, element) in zip(
            tff_names.iter_elements(type_spec), elements, strict=True
        ):
            element_message = message.struct.element.add()
            if name is not None:
                element_message.name = name
            _fill(element_message.value, element, element_type)
    elif _is_large_array(value, type_spec):
        empty = np.zeros([0], value.dtype)
        message.array.CopyFrom(tff_private.array.to_proto_content(empty))
        message.array.shape.dim[:] = value.shape
        message.array.content = value.tobytes()
    else:
        message.CopyFrom(tff_private.value_serialization.serialize_value(value, type_spec)[0])


def _is_large_array(value: Any, type_spec: tff_names.Type) -> bool:
    """Checks whether a value is a large array of exactly its type."""
    return (
        isinstance(type_spec, tff_names.TensorType)
        and isinstance(value, np.ndarray)
        and value.size > 1000
        and value.dtype == type_spec.dtype
        and value.dtype.kind in "fiub"
        and value.shape == type_spec.shape
    )
