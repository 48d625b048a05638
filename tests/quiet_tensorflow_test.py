"""Tests of loading TensorFlow's libraries without what they log, with one that stands in."""

import os
import signal
import subprocess
import sys

import pytest

_LOADED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
stream = ctypes.c_void_p.in_dll(libc, "stderr")
libc.fputs(b"I0000 cudart_stub.cc:31] no drivers\\n", stream)
libc.fflush(stream)
print("of Python", file=sys.stderr)
os.write(2, b"of the process\\n")
"""
_IMPORT = "import tff_dpftrl; from tensorflow import _pywrap_library as library; "
_IMPORT += "library.libc.fputs(b'later\\n', "
_IMPORT += "library.ctypes.c_void_p.in_dll(library.libc, 'stderr'))"


@pytest.fixture
def run(tmp_path):
    """Runs code where a library of TensorFlow has the given source; returns the process."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("")

    def run(source, code, level, *flags):
        (tmp_path / "tensorflow" / "_pywrap_library.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environment = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": level}
        command = [sys.executable, *flags, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    return run


@pytest.mark.parametrize(
    "level, logged", [("3", []), ("0", ["I0000 cudart_stub.cc:31] no drivers"])]
)
def test_only_logs_of_loading_are_left_out(run, level, logged):
    done = run(_LOADED, _IMPORT, level)
    assert done.stderr.splitlines() == [*logged, "of Python", "of the process", "later"]


@pytest.mark.parametrize("flags", [[], ["-X", "faulthandler"]])
def test_a_library_that_ends_the_process_says_why(run, flags):
    source = _LOADED.replace("I0000 cudart_stub.cc:31] no drivers", "This machine has no AVX.")
    done = run(f"{source}libc.abort()", _IMPORT, "3", *flags)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("of Python\nof the process\nThis machine has no AVX.\n")
    assert ("Fatal Python error: Aborted" in done.stderr) == bool(flags)


def test_a_later_end_is_as_it_was(run):
    done = run(_LOADED, f"{_IMPORT}; library.libc.abort()", "3")
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.splitlines() == ["of Python", "of the process", "later"]


def test_a_finder_of_old_python_does_not_matter(run):
    old = "class Old: find_module = staticmethod(lambda name, path: None)\n"
    code = f"import tff_dpftrl, sys\n{old}sys.meta_path.insert(0, Old)\n{_IMPORT}"
    assert run(_LOADED, code, "3").stderr.endswith("\nlater\n")


def test_an_error_of_the_import_is_raised(run):
    code = "import tff_dpftrl\ntry: import tensorflow._pywrap_library\n"
    code += "except ImportError as error: print(error)\n"
    assert run("raise ImportError('no AVX')", code, "3").stdout == "no AVX\n"
