"""The rows of `private/metrics.csv` as TensorBoard events."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tff_dpftrl.runs import tensorflow_files

_Metadata = tf.compat.v1.SummaryMetadata
_SCALARS = _Metadata(plugin_data=_Metadata.PluginData(plugin_name="scalars"))


class TensorBoardLog:
    """Writes rows to `private/tensorboard` of a run, for the owner only.

    Events tell when they were written, and so how long a round took.
    """

    def __init__(self, folder: pathlib.Path):
        """Opens a new file of events in the folder of a run."""
        self._folder = folder / "private" / "tensorboard"
        self._folder.parent.mkdir(mode=0o700, exist_ok=True)
        older = folder / "tensorboard"  # That of a run of an earlier version.
        if older.is_dir() and not self._folder.exists():
            older.rename(self._folder)
        with tensorflow_files.as_os_error(self._folder):
            self._writer = tf.summary.create_file_writer(str(self._folder))
            self._writer.flush()
        for path in (self._folder, *self._folder.iterdir()):
            path.chmod(0o700 if path.is_dir() else 0o600)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one scalar for each number of a row; "round" is the step."""
        with (
            tensorflow_files.as_os_error(self._folder),
            self._writer.as_default(step=row["round"]),
        ):
            for name, value in row.items():
                if name != "round" and value is not None:
                    # `tf.summary.scalar` needs TensorBoard, which TensorFlow 2.21 does not bring.
                    tensor = tf.constant(value, tf.float32)
                    tf.summary.write(name, tensor, metadata=_SCALARS)

    def close(self) -> None:
        """Flushes the events."""
        with tensorflow_files.as_os_error(self._folder):
            self._writer.close()
