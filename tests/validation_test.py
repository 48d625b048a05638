"""Tests of the checks of arguments."""

import math
import os
import types

import numpy as np
import pytest

from tff_dpftrl import validation


def test_values_come_back_as_plain_numbers():
    assert type(validation.integer("n", np.int64(3), minimum=3)) is int
    assert type(validation.number("x", np.float32(0.5))) is float
    assert validation.positive("x", 2) == 2.0
    assert validation.probability("q", 1) == 1.0
    assert validation.noise_multiplier(0) == 0.0
    assert validation.delta(1e-300) == 1e-300


@pytest.mark.parametrize("value", [2, 2.5, "3", None, math.nan, True])
def test_integers(value):
    with pytest.raises(ValueError, match=r"^n must be (an integer|at least 3), got"):
        validation.integer("n", value, minimum=3)


def test_sequences_of_numbers():
    assert validation.numbers("xs", np.array([1, 2])) == (1.0, 2.0)
    for values in (3, None, ["a"], "ab"):
        with pytest.raises(ValueError, match="xs must be a sequence of numbers, got"):
            validation.numbers("xs", values)


@pytest.mark.parametrize(
    "value", [0, -1.0, math.inf, -math.inf, math.nan, "1", None, True, 10**400]
)
def test_positive(value):
    with pytest.raises(ValueError, match=r"^x must be a finite number, above 0, got .*\. Raise it"):
        validation.positive("x", value, remedy="Raise it.")


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (validation.probability, 0.0),
        (validation.probability, 1.0 + 1e-9),
        (lambda name, value: validation.delta(value, name), 1.0),
        (lambda name, value: validation.delta(value, name), 0.0),
        (lambda name, value: validation.noise_multiplier(value, name), -1e-9),
        (lambda name, value: validation.noise_multiplier(value, name), math.inf),
        (lambda name, value: validation.number(name, value, at_least=1, below=2), 2.0),
    ],
)
def test_bounds(check, value):
    with pytest.raises(ValueError, match=f"^x must be a finite number, .*got {value!r}"):
        check("x", value)


class _TorchDtype:
    """Stands for a dtype of PyTorch, which has no name but its text."""

    def __init__(self, text):
        self._text = text

    def __str__(self):
        return self._text


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float8_e5m2", "complex64", "int8", "bool"]
)
def test_floats_of_all_frameworks_are_known_from_other_numbers(name):
    for dtype in (types.SimpleNamespace(name=name), _TorchDtype(f"torch.{name}")):
        if "float" in name:
            validation.float_dtype("xs", dtype)
        else:
            with pytest.raises(validation.UsageError, match=f"^xs must have only .* got {name}: "):
                validation.float_dtype("xs", dtype)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("missing", r"cannot be read \(No such file or directory\)"),
        ("loop", "is a loop of links"),
        ("x" * 300, r"cannot be read \(File name too long\)"),
        ("a\0b", "is no name of a file"),
        ("\ud800", "is no name of a file"),
        ("folder", "is no regular file"),
        ("pipe", "is no regular file"),
        ("", "is no regular file"),
        ("/dev/zero", "leads out of the folder"),
        ("../outside", "leads out of the folder"),
        ("../models--a/blobs/0", "leads out of the folder"),
        ("{}/models--a/blobs/0", "leads out of the folder"),
        ("../nothing", "leads out of the folder"),
        ("link", "leads out of the folder"),
        ("folder/up/../outside", "leads out of the folder"),
        ("large", "has 9 bytes, and at most 8 are read"),
    ],
)
def test_a_file_is_one_of_its_folder(tmp_path, name, problem):
    folder = tmp_path / "given"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "outside").write_text("")
    (tmp_path / "models--a" / "blobs").mkdir(parents=True)
    (tmp_path / "models--a" / "blobs" / "0").write_text("")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to("loop")
    (folder / "folder" / "up").symlink_to(folder)
    (folder / "large").write_bytes(bytes(9))
    os.mkfifo(folder / "pipe")
    with pytest.raises(validation.UsageError, match=f"{problem}.*Restore it") as raised:
        validation.file_in(folder, name.format(tmp_path), max_bytes=8)
    assert "\n" not in str(raised.value)


def test_a_link_may_lead_to_another_file_of_the_folder(tmp_path):
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "file").write_text("x")
    (tmp_path / "file").symlink_to("..data/file")
    (tmp_path.parent / "the same").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path.parent / "the same"):
        assert validation.file_in(folder, "file").read_text() == "x"


def test_of_the_hubs_files_only_links_lead_to_those_of_the_same_repository(tmp_path):
    for name in "ab":
        (tmp_path / f"models--{name}" / "blobs").mkdir(parents=True)
        (tmp_path / f"models--{name}" / "blobs" / "0").write_text(name)
    folder = tmp_path / "models--a" / "snapshots" / "f00"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").symlink_to("../../../blobs/0")
    assert validation.file_in(folder, "inner/a").read_text() == "a"
    assert validation.file_in(folder / "inner", "a").read_text() == "a"
    (folder / "b").symlink_to("../../../models--b/blobs/0")
    for name in ("b", "../../blobs/0", str(tmp_path / "models--a" / "blobs" / "0")):
        with pytest.raises(validation.UsageError, match="leads out of the folder"):
            validation.file_in(folder, name)
