"""What a crash of a server leaves behind."""

import subprocess
import sys

import pytest

_PROBE = """
import ctypes, resource
from tff_dpftrl.runtime import core_files
core_files.forbid()
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
"""


@pytest.mark.skipif(sys.platform != "linux", reason="marks of processes are Linux's")
def test_a_process_leaves_no_core_file():
    # In a process of its own: the mark would stay with the tests.
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")
