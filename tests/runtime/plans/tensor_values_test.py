"""Tensors as bytes: back bit for bit, and refused when they are not what a plan says."""

import math

import numpy as np
import pytest

from tff_dpftrl.runtime.plans import plan_pb2, tensor_values

_ARRAYS = [
    np.array([[1.5, np.nan, -0.0]], np.float32),
    np.array(2**62 + 1, np.int64),
    np.zeros([0, 4], np.float64),
    np.array([True, False]),
]
_TENSORS = [
    plan_pb2.Tensor(label="a", dtype="float32", shape=[1, -1]),
    plan_pb2.Tensor(label="b", dtype="int64"),
    plan_pb2.Tensor(label="c", dtype="float64", shape=[-1, 4]),
    plan_pb2.Tensor(label="d", dtype="bool", shape=[2]),
]


def test_arrays_come_back_bit_for_bit():
    content = tensor_values.to_bytes(_ARRAYS)
    found = tensor_values.from_bytes(content, _TENSORS)
    for array, other in zip(_ARRAYS, found, strict=True):
        assert array.dtype == other.dtype and array.shape == other.shape
        assert array.tobytes() == other.tobytes()
    assert tensor_values.to_bytes(found) == content


def test_the_bytes_are_those_of_protocol_buffers():
    # The lengths of contents and values take one, two and three bytes.
    sizes = [np.arange(size, dtype=np.float32) for size in (1, 25, 31, 40, 5000, 70_000)]
    for arrays in (_ARRAYS, sizes, []):
        made = plan_pb2.Values()
        for array in arrays:
            made.values.add(dtype=array.dtype.name, shape=array.shape, content=array.tobytes())
        content = tensor_values.to_bytes(arrays)
        assert content == made.SerializeToString(deterministic=True)


def test_what_to_bytes_wrote_is_read_without_a_copy_and_other_spellings_with_one():
    array = np.arange(300, dtype=np.float32).reshape(3, 100)
    tensors = [plan_pb2.Tensor(dtype="float32", shape=[3, 100])]
    content = tensor_values.to_bytes([array])
    (found,) = tensor_values.from_bytes(content, tensors)
    assert np.shares_memory(found, np.frombuffer(content, np.uint8))
    np.testing.assert_array_equal(found, array)
    other = plan_pb2.Values.Value.CONTENT_FIELD_NUMBER << 3 | 2  # The content comes first.
    value = bytes([other, 0xB0, 0x09]) + array.tobytes()
    value += plan_pb2.Values.Value(dtype="float32", shape=[3, 100]).SerializeToString()
    length = len(value)
    spelled = b"\x0a" + bytes([length & 0x7F | 0x80, length >> 7]) + value
    (found,) = tensor_values.from_bytes(spelled, tensors)
    np.testing.assert_array_equal(found, array)
    for cut in (content[:-1], content + b"x", b"y" + content):
        with pytest.raises(tensor_values.ValuesError):
            tensor_values.from_bytes(cut, tensors)


def test_order_and_byte_order_in_memory_do_not_matter():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    content = tensor_values.to_bytes([array])
    assert tensor_values.to_bytes([np.asfortranarray(array)]) == content
    assert tensor_values.to_bytes([array.astype(">i4")]) == content


@pytest.mark.parametrize(
    ("index", "other", "message"),
    [
        (0, np.zeros([1, 3]), r"a, must be float32 of shape \[1, -1\], got float64"),
        (0, np.zeros([2, 3], np.float32), r"got float32 of shape \[2, 3\]"),
        (0, np.zeros([3], np.float32), r"must be float32 of shape \[1, -1\], got 1 dimensions"),
    ],
)
def test_other_tensors_are_refused(index, other, message):
    arrays = list(_ARRAYS)
    arrays[index] = other
    with pytest.raises(tensor_values.ValuesError, match=message):
        tensor_values.from_bytes(tensor_values.to_bytes(arrays), _TENSORS)


def test_another_number_of_tensors_is_refused():
    content = tensor_values.to_bytes(_ARRAYS[:3])
    with pytest.raises(tensor_values.ValuesError, match="update must have 4 tensors, got 3"):
        tensor_values.from_bytes(content, _TENSORS, "update")


def test_strings_are_refused():
    with pytest.raises(tensor_values.ValuesError, match="only numbers"):
        tensor_values.to_bytes([np.array([b"text"], object)])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"dtype": "float32", "shape": [2], "content": b"1234"}, "cannot have 4 bytes"),
        ({"dtype": "float32", "shape": [-1], "content": b""}, "cannot have 0 bytes"),
        ({"dtype": "float32", "shape": [-1, -1], "content": b"1234"}, "cannot have 4 bytes"),
        ({"dtype": "float32", "shape": [2**62, 4, 2**62], "content": b""}, "cannot have 0"),
        ({"dtype": "object", "content": b"12345678"}, "unknown dtype 'object'"),
    ],
)
def test_values_that_lie_about_themselves_are_refused(value, message):
    values = plan_pb2.Values(values=[plan_pb2.Values.Value(**value)])
    tensor = plan_pb2.Tensor(dtype="float32", shape=[-1] * len(value.get("shape", ())))
    with pytest.raises(tensor_values.ValuesError, match=message):
        tensor_values.from_bytes(values.SerializeToString(), [tensor])


def test_a_shape_of_many_sizes_is_not_multiplied(monkeypatch):
    # A megabyte of them takes minutes, in which no other thread runs.
    values = plan_pb2.Values(values=[{"dtype": "float32", "shape": [127] * 250_000}])
    monkeypatch.setattr(math, "prod", lambda sizes: pytest.fail("multiplied"))
    with pytest.raises(tensor_values.ValuesError, match="got 250000 dimensions") as refused:
        tensor_values.from_bytes(
            values.SerializeToString(), [plan_pb2.Tensor(dtype="float32", shape=[3])]
        )
    assert len(str(refused.value)) < 200


def test_more_tensors_than_there_may_be_are_not_looked_at(monkeypatch):
    values = plan_pb2.Values(values=[{"dtype": "float32", "content": b"1234"}] * 1000)
    monkeypatch.setattr(np, "frombuffer", lambda *args: pytest.fail("looked at"))
    with pytest.raises(tensor_values.ValuesError, match="must have 1 tensors, got 1000"):
        tensor_values.from_bytes(values.SerializeToString(), [plan_pb2.Tensor(dtype="float32")])


def test_a_report_that_came_in_parts_is_read_and_refused_like_any_other():
    content = tensor_values.to_bytes(_ARRAYS)
    for sent in (content, content + b"\x7a\x00"):  # With an unknown field at the end.
        read = tensor_values.from_bytes(bytearray(sent), _TENSORS)
        assert tensor_values.to_bytes(read) == content
        assert not any(array.flags.writeable for array in read)
    for sent in (b"", b"\xff\xff\xff", content[:-1]):
        with pytest.raises(tensor_values.ValuesError):
            tensor_values.from_bytes(bytearray(sent), _TENSORS)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(tensor_values.ValuesError, match="state cannot be read"):
        tensor_values.from_bytes(b"\xff\xff", [], "state")
