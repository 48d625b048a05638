"""Keeps off standard error what TensorFlow logs while it is loaded.

Its libraries log before they read TF_CPP_MIN_LOG_LEVEL. They write to C's stream `stderr`, which
leads nowhere while one of them is loaded; Python's `sys.stderr` and the file descriptor stay.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
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
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            for step in ("create_module", "exec_module"):
                setattr(spec.loader, step, _without_logs()(getattr(spec.loader, step)))
        return spec


@functools.cache
def _streams():
    """Returns C's variable `stderr`, its value, and a stream that leads nowhere.

    None without the GNU C library.
    """
    import ctypes  # It takes long to import.

    try:
        ctypes.CDLL("libstdc++.so.6")  # Else `std::cerr` would begin, and stay, with no stream.
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        nowhere = libc.fopen(b"/dev/null", b"w")
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        return (stderr, stderr.value, nowhere) if nowhere else None
    except (AttributeError, OSError, ValueError):
        return None


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    if (streams := _streams()) is None:
        yield
        return
    # A library that aborts has lost its message: at least the place is shown.
    has_handler = faulthandler.is_enabled()
    if not has_handler:
        faulthandler.enable(2)
    stderr, usual, nowhere = streams
    stderr.value = nowhere
    try:
        yield
    finally:
        stderr.value = usual
        if not has_handler:
            faulthandler.disable()
