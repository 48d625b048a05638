"""Files that TensorFlow writes itself, whose errors are none of the operating system's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def as_os_error(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of TensorFlow operations, like a full disk, into an OSError about `path`."""
    try:
        yield
    except tf.errors.OpError as error:
        # "{{function_node ...}} FILE; No space left on device [Op:...] name: \n\tFailed to ..."
        lines = error.message.splitlines() or [type(error).__name__]
        reason = lines[0].rpartition("; ")[2].partition(" [Op:")[0].strip()
        raise OSError(f"{os.fspath(path)} cannot be written: {reason}.") from None
