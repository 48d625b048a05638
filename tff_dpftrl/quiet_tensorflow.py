"""Keeps off standard error what TensorFlow logs while it is loaded.

Its libraries log before they read TF_CPP_MIN_LOG_LEVEL. They write to C's stream `stderr`, which
leads to memory while one of them is loaded; Python's `sys.stderr` and the file descriptor stay.
What memory has is shown if the library aborts in the thread that loads it, as it does on a machine
without AVX.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import signal
import sys
from collections.abc import Iterator


def install() -> None:
    """Has TensorFlow's libraries loaded quietly in this process from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds TensorFlow's libraries where Python finds them, and has them loaded quietly."""

    def find_spec(self, name, path=None, target=None):
        if not (name.startswith("tensorflow.") and name.rpartition(".")[2].startswith("_pywrap")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            for step in ("create_module", "exec_module"):
                setattr(spec.loader, step, _without_logs()(getattr(spec.loader, step)))
        return spec


@functools.cache
def _streams():
    """Returns the C library, its variable `stderr`, its value, and a stream to memory.

    Also a handler of SIGABRT, which shows what the stream kept, and room for the handler that it
    stands in for. None without the GNU C library.
    """
    import ctypes  # It takes long to import.

    try:
        ctypes.CDLL("libstdc++.so.6")  # Else `std::cerr` would begin, and stay, with no stream.
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        memory = os.memfd_create("stderr")
        if (stream := libc.fdopen(memory, b"w")) is None:
            return None
        libc.setvbuf(ctypes.c_void_p(stream), None, 2, 0)  # Unbuffered, as `stderr` is.
    except (AttributeError, OSError, ValueError):
        return None

    usual_action = ctypes.create_string_buffer(256)  # More than a `struct sigaction` takes.

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def show(number):
        os.write(2, os.pread(memory, os.fstat(memory).st_size, 0))
        libc.sigaction(number, usual_action, None)
        getattr(libc, "raise")(number)

    return libc, stderr, stderr.value, stream, show, usual_action


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    if (streams := _streams()) is None or streams[1].value == streams[3]:
        yield
        return
    libc, stderr, usual, stream, show, usual_action = streams
    libc.sigaction(signal.SIGABRT, None, usual_action)
    libc.signal(signal.SIGABRT, show)
    stderr.value = stream
    try:
        yield
    finally:
        stderr.value = usual
        libc.sigaction(signal.SIGABRT, usual_action, None)
