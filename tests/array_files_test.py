"""Archives of arrays: what NumPy writes is read; no more is believed of a file than it holds."""

import io
import pickle
import struct
import zipfile

import numpy as np
import pytest

from tff_dpftrl import array_files

_ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b/c": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "text": np.array("some words, ß"),
    "none": np.zeros((0, 4), np.int8),
    "one": np.float64(3),
}


def _npy(header, content=b""):
    line = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + content


def _header(shape, descr="<f4"):
    return f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"


def _write(path, *entries, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return path


def _refused(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        array_files.read(path)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400


def test_what_numpy_writes_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", **_ARRAYS)
    arrays = array_files.read(tmp_path / "a.npz")
    assert arrays.keys() == _ARRAYS.keys()
    for name, array in arrays.items():
        assert array.dtype == _ARRAYS[name].dtype and array.flags.writeable
        np.testing.assert_array_equal(array, _ARRAYS[name])


def test_what_is_compressed_is_refused_before_it_is_unpacked(tmp_path):
    bomb = _npy(_header((10**7,)), bytes(4 * 10**7))
    path = _write(tmp_path / "a.npz", ("a.npy", bomb), method=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    _refused(path, "larger than the file")
    small = _npy(_header((2,)), bytes(8))
    path = _write(tmp_path / "b.npz", ("a.npy", small), method=zipfile.ZIP_DEFLATED)
    _refused(path, "compressed")


@pytest.mark.parametrize(
    "header",
    [
        _header((10**12,)),
        _header((-1,)),
        _header((1,), "<U1000000000"),
        _header((2,), "<f8"),
        _header((), "|O"),
        _header((1,) * 40),
        "(" * 5000,
        "no header",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",), }",
    ],
    ids=range(9),
)
def test_an_array_of_another_size_or_kind_than_its_part_of_the_file_is_refused(tmp_path, header):
    path = _write(tmp_path / "a.npz", ("a.npy", _npy(header, bytes(8))))
    _refused(path, "it has an array|it holds objects|is no archive")


def test_nothing_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    content = _npy(_header((1,), "|O"), pickle.dumps(np.array([Evil()])))
    _refused(_write(tmp_path / "a.npz", ("a.npy", content)), "no plain values")


def test_entries_that_share_their_bytes_are_refused(tmp_path):
    path = _write(tmp_path / "a.npz", ("a.npy", _npy(_header((1000,)), bytes(4000))))
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist *= 50  # The directory names it fifty times.
        archive._didModify = True
    _refused(path, "larger than the file")


def test_two_arrays_of_one_name_are_refused(tmp_path):
    array = _npy(_header((1,)), bytes(4))
    with pytest.warns(UserWarning, match="Duplicate"):
        path = _write(tmp_path / "a.npz", ("a.npy", array), ("a.npy", array))
    _refused(path, "two arrays of one name")


def test_other_files_are_refused(tmp_path):
    _refused(_write(tmp_path / "a.npz", ("../evil", b"x")), "which is no array")
    good = io.BytesIO()
    np.savez(good, **_ARRAYS)
    for size in (0, 10, 100, len(good.getvalue()) - 1):
        (tmp_path / "b.npz").write_bytes(good.getvalue()[:size])
        _refused(tmp_path / "b.npz", "is no archive of arrays")
    changed = bytearray(good.getvalue())
    changed[changed.index(_ARRAYS["a"].tobytes()[4:8])] ^= 1
    (tmp_path / "c.npz").write_bytes(changed)
    _refused(tmp_path / "c.npz", "damaged")
    with pytest.raises(OSError):
        array_files.read(tmp_path)
