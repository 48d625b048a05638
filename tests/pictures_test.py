"""Tests of figures in files."""

import os
import subprocess
import sys

import pytest

from tff_dpftrl import pictures

pytest.importorskip("matplotlib")


@pytest.mark.pictures
def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    figure = pictures.new_figure(1, 1)
    path = tmp_path / "picture.png"
    pictures.write(path, figure, dpi=10)
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    figure.set_size_inches(1e6, 1e6)
    with pytest.raises(ValueError, match="too large"):
        pictures.write(path, figure, dpi=10)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("backend, kept", [("gtk", "None"), ("svg", "svg")])
def test_a_backend_of_the_environment_does_not_matter(tmp_path, backend, kept):
    code = (
        "from tff_dpftrl import pictures\n"
        "pictures.write('picture.png', pictures.new_figure(1, 1))\n"
        "import matplotlib, os\n"
        "assert os.environ.get('MPLBACKEND') in (None, matplotlib.rcParams['backend'])\n"
        "print(os.environ.get('MPLBACKEND'))"
    )
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "MPLBACKEND": backend},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout == f"{kept}\n"  # A notebook's own figures need its backend.


def test_an_import_that_fails_leaves_the_environment(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "svg")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError):
        pictures.new_figure(1, 1)
    assert os.environ["MPLBACKEND"] == "svg"
