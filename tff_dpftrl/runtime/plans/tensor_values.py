"""Values of tensors as bytes: broadcasts, updates, and a server's state.

Needs NumPy only. Floating-point numbers keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf import message

from tff_dpftrl import array_files, validation
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.store import contents

_DTYPES = (
    *("bool", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
DTYPES = frozenset(_DTYPES)
"""Names of the dtypes whose values can be sent and stored."""

_VALUE_TAG = bytes([plan_pb2.Values.VALUES_FIELD_NUMBER << 3 | 2])  # Length-delimited fields.
_CONTENT_TAG = bytes([plan_pb2.Values.Value.CONTENT_FIELD_NUMBER << 3 | 2])

MOST_DIMENSIONS = array_files.MOST_DIMENSIONS
"""Largest number of dimensions of a tensor, as in NumPy and TensorFlow."""


class ValuesError(validation.UsageError):
    """Raised for values that do not fit their description in a plan."""


def num_entries(sizes: Iterable[int]) -> int:
    """Counts the entries of a tensor whose dimensions come from an untrusted source.

    A product above 2⁶⁴ gives some number of at least 2⁶⁴, so that it takes no time.
    """
    product = 1
    for size in sizes:
        product *= size
        if product >> 64:
            return product
    return product


def to_bytes(values: Sequence[np.ndarray]) -> bytes:
    """Serialises arrays, without another copy in memory; equal arrays give equal bytes."""
    return b"".join(to_parts(values))


def to_parts(values: Sequence[np.ndarray]) -> list[bytes | memoryview]:
    """Serialises arrays as parts, which share their memory."""
    parts: list[bytes | memoryview] = []
    for index, value in enumerate(map(np.asarray, values)):
        if value.dtype.name not in DTYPES:
            raise ValuesError(f"values[{index}] has dtype {value.dtype}; only numbers can be sent.")
        parts.append(_head(value.dtype.name, value.shape, value.nbytes))
        little = np.asarray(value, value.dtype.newbyteorder("<"), order="C")
        parts.append(little.reshape(-1).view(np.uint8).data)
    return parts


def _head(dtype: str, shape: Iterable[int], num_bytes: int) -> bytes:
    """Returns what stands before the content of a value in a serialized `Values`."""
    head = plan_pb2.Values.Value(dtype=dtype, shape=shape).SerializeToString(deterministic=True)
    if num_bytes:
        head += _CONTENT_TAG + _varint(num_bytes)
    return _VALUE_TAG + _varint(len(head) + num_bytes) + head


def _varint(number: int) -> bytes:
    """Encodes a number as Protocol Buffers do: seven bits a byte, the least significant first."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def from_bytes(
    content: bytes | bytearray | memoryview,
    tensors: Sequence[plan_pb2.Tensor],
    name: str = "content",
) -> list[np.ndarray]:
    """Reads untrusted bytes of `to_bytes`, which must fit the tensors of a plan.

    The arrays are not writable: they share the memory of `content`. `name` is theirs in messages.
    """
    content = memoryview(content).toreadonly()  # Protocol Buffers refuse a bytearray.
    arrays = _as_written(content, tensors)
    if arrays is not None:
        return arrays
    try:
        read = plan_pb2.Values.FromString(content)
    except message.DecodeError:
        raise ValuesError(f"{name} cannot be read as tensors.") from None
    _check_number(len(read.values), tensors, name)
    arrays = []
    for index, (value, tensor) in enumerate(zip(read.values, tensors, strict=True)):
        if value.dtype not in DTYPES:
            raise ValuesError(f"{name}[{index}] has the unknown dtype {value.dtype[:20]!r}.")
        if len(value.shape) != len(tensor.shape):  # Refuse a million sizes before multiplying.
            raise ValuesError(
                f"{name}, {tensor.label or 'its tensor'}, must be {tensor.dtype} of shape "
                f"{list(tensor.shape)}, got {len(value.shape)} dimensions."
            )
        dtype = np.dtype(value.dtype).newbyteorder("<")
        if min(value.shape, default=0) < 0 or (
            math.prod(value.shape) * dtype.itemsize != len(value.content)
        ):
            raise ValuesError(
                f"{name}[{index}] of shape {list(value.shape)} and dtype {value.dtype} "
                f"cannot have {len(value.content)} bytes."
            )
        arrays.append(np.frombuffer(value.content, dtype).reshape(value.shape))
    check(arrays, tensors, name)
    return arrays


def from_content(
    content: contents.Serialised, begin: int, tensors: Sequence[plan_pb2.Tensor], name: str
) -> list[np.ndarray]:
    """Reads arrays as `from_bytes` does, from a content that need not be in memory.

    The parts that `to_parts` returned are at its end, from the byte `begin` on.
    """
    if not isinstance(content, contents.Content):
        return from_bytes(memoryview(content)[begin:], tensors, name)
    before, heads, arrays = bytearray(begin), [], []
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype).newbyteorder("<")
        shape = tuple(tensor.shape)
        heads.append(_head(tensor.dtype, shape, num_entries(shape) * dtype.itemsize))
        arrays.append(array_files.aligned(shape, dtype))
    found = [bytearray(len(head)) for head in heads]
    buffers = [memoryview(before)]
    for head, array in zip(found, arrays, strict=True):
        buffers += [memoryview(head), array.reshape(-1).view(np.uint8).data]
    if sum(map(len, buffers)) != len(content):
        raise ValuesError(f"{name} has {len(content)} bytes: these are other tensors.")
    content.fill(buffers)
    if found != heads:
        raise ValuesError(f"{name} cannot be read as tensors of this plan.")
    return arrays


def _as_written(view: memoryview, tensors: Sequence[plan_pb2.Tensor]) -> list[np.ndarray] | None:
    """Reads what `to_bytes` wrote of such tensors, without a copy; None if it wrote other bytes."""
    end, places = 0, []
    for tensor in tensors:
        if tensor.dtype not in DTYPES or min(tensor.shape, default=0) < 0:
            return None
        dtype = np.dtype(tensor.dtype).newbyteorder("<")
        num_bytes = num_entries(tensor.shape) * dtype.itemsize
        head = _head(tensor.dtype, tensor.shape, num_bytes)
        begin = end + len(head)
        end, before = begin + num_bytes, end
        if end > len(view) or view[before:begin] != head:
            return None
        places.append((begin, end, dtype))
    if end != len(view):
        return None
    return [
        np.frombuffer(view[begin:end], dtype).reshape(tuple(tensor.shape))
        for (begin, end, dtype), tensor in zip(places, tensors, strict=True)
    ]


def check(arrays: Sequence[np.ndarray], tensors: Sequence[plan_pb2.Tensor], name: str) -> None:
    """Refuses arrays that do not fit the tensors of a plan."""
    _check_number(len(arrays), tensors, name)
    for array, tensor in zip(arrays, tensors, strict=True):
        wanted = tuple(tensor.shape)
        fits = len(array.shape) == len(wanted) and all(
            want in (-1, size) for size, want in zip(array.shape, wanted, strict=True)
        )
        if array.dtype.name != tensor.dtype or not fits:
            raise ValuesError(
                f"{name}, {tensor.label or 'its tensor'}, must be {tensor.dtype} of shape "
                f"{list(wanted)}, got {array.dtype.name} of shape {list(array.shape)}."
            )


def _check_number(count: int, tensors: Sequence[plan_pb2.Tensor], name: str) -> None:
    if count != len(tensors):
        raise ValuesError(f"{name} must have {len(tensors)} tensors, got {count}.")
