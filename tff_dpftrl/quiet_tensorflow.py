"""Keeps off standard error what TensorFlow logs while it is loaded.

Its libraries log before they read TF_CPP_MIN_LOG_LEVEL. They write to C's stream `stderr`, which
leads nowhere in the meantime; Python's `sys.stderr` and the file descriptor are as before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Iterator


def install() -> None:
    """Makes the import of TensorFlow in this process a quiet one."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds TensorFlow where Python finds it, and has it loaded quietly."""

    def find_spec(self, name, path=None, target=None):
        if name != "tensorflow":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _without_logs()(spec.loader.exec_module)
        return spec


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    import ctypes  # It takes long to import.

    try:
        ctypes.CDLL("libstdc++.so.6")  # Else `std::cerr` would begin, and stay, with no stream.
        libc = ctypes.CDLL(None)
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        libc.fopen.restype = ctypes.c_void_p
        nowhere = libc.fopen(b"/dev/null", b"w")  # Never closed: who has it may keep it.
    except (AttributeError, OSError, ValueError):  # No GNU C library: TensorFlow logs.
        nowhere = None
    if not nowhere:
        yield
        return
    # A library that aborts has lost its message: at least the place is shown.
    has_handler = faulthandler.is_enabled()
    if not has_handler:
        faulthandler.enable(2)
    stderr.value, usual = nowhere, stderr.value
    try:
        yield
    finally:
        stderr.value = usual
        if not has_handler:
            faulthandler.disable()
