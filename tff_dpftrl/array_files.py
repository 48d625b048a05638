"""Reader of untrusted archives of arrays (`.npz`), with bounded memory.

`numpy.load` without pickle runs no code of a file, but trusts its sizes. Here an array is as large
as the part of the file that holds it, as `numpy.savez` writes it.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

from tff_dpftrl import validation

MOST_DIMENSIONS = 32
"""Largest number of dimensions of an array, as in TensorFlow and NumPy 1."""

ALIGNMENT = 64
"""Bytes at whose multiples `aligned` begins."""

_SUFFIX = ".npy"
_PART = 1 << 20
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Errors of `zipfile` and NumPy for invalid archives and headers, besides ValueError.
_DAMAGE = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, struct.error),
    *(OverflowError, TypeError, tokenize.TokenError, MemoryError),
)


def aligned(shape: Sequence[int], dtype: np.dtype, *, zero: bool = False) -> np.ndarray:
    """Returns an array of any values, or zeros, in memory aligned as TensorFlow aligns tensors."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if zero else np.empty)(num_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads all arrays of an archive that is not compressed, by name, writable.

    Refused are damaged or compressed archives, values other than plain ones, and arrays that claim
    to be larger than the file.
    """
    return dict(each(path))


def each(path: str | os.PathLike[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name of each array of an archive, and the array; errors are those of `read`.

    An array is read when it is its turn: the memory is that of one, if the caller keeps none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > os.path.getsize(path):
                raise validation.UsageError("its arrays claim to be larger than the file")
            if len({entry.filename for entry in entries}) < len(entries):
                raise validation.UsageError("it has two arrays of one name")
            for entry in entries:
                yield _name(entry), _array(archive, entry)
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise validation.UsageError(
            f"it is no archive of arrays, or is damaged: {reason}"
        ) from error


def _name(entry: zipfile.ZipInfo) -> str:
    if not entry.filename.endswith(_SUFFIX):
        raise validation.UsageError(f"it has the entry {entry.filename[:100]!r}, which is no array")
    return entry.filename.removesuffix(_SUFFIX)


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise validation.UsageError("it is compressed: write it anew with numpy.savez")
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise validation.UsageError(f"it has an array of version {version}")
        try:
            shape, is_fortran, dtype = _HEADERS[version](stream)
        except ValueError:  # Its text quotes the header.
            raise validation.UsageError("it has an array whose header cannot be read") from None
        num_bytes = entry.file_size - stream.tell()
        if dtype.hasobject or len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0:
            raise validation.UsageError("it holds objects that are no plain values")
        if dtype.itemsize < 0 or math.prod(shape) * dtype.itemsize != num_bytes:
            raise validation.UsageError("it has an array whose size is not that of its header")
        content, at = aligned([num_bytes], np.dtype(np.uint8)), 0
        while part := stream.read(min(_PART, num_bytes - at)):
            content[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        if at < num_bytes:
            raise validation.UsageError("it has an array that ends early")
    order = "F" if is_fortran else "C"
    return np.ndarray(shape, dtype, content.data, order=order)
