"""Noise of one round after the other, with the past noise that it depends on.

All of it is a function of the seed and the round, so that a party that was killed draws the same
noise again. A checkpoint of the past noise makes that quick. It may be lost; one that is damaged is
not used.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_dpftrl import durable_files
from tff_dpftrl.private_round import party_noise

_ROWS_BETWEEN_CHECKPOINTS = 16


class _Drawn(NamedTuple):
    """Unit noise of a round: that of the update, that of the count, and the state after it."""

    row: int
    noise: tf.Tensor
    count: tf.Tensor
    after: party_noise.State


class Rows:
    """Noise of a task's rounds; for one thread."""

    def __init__(
        self,
        noise: party_noise.PartyNoise,
        seed: np.ndarray,
        checkpoint: str | os.PathLike[str] | None = None,
    ):
        """Begins at the checkpoint, if there is one.

        Args:
          noise: Noise of the task.
          seed: Root seed of the noise, int64.
          checkpoint: File for past noise, which is secret; None for no file.
        """
        self._noise, self._seed = noise, seed
        self._path = None if checkpoint is None else pathlib.Path(checkpoint)
        self._state = noise.initial_state(seed)
        self._drawn: _Drawn | None = None
        self._kept = 0  # Row of the state in the checkpoint.
        if self._path is not None:
            self._read(self._path)

    def prepare(self, row: int) -> None:
        """Draws the unit noise of a round, such as while the server chooses devices.

        Args:
          row: Index of the round.
        """
        if self._drawn is not None and self._drawn.row == row:
            return
        drawn = self._drawn
        if drawn is not None and drawn.row < row:
            self._state = drawn.after
        if int(self._state.round_index) > row:
            self._state = self._noise.initial_state(self._seed)
        self._state = self._noise.before_round(self._state, row)
        self._keep(row)
        self._drawn = _Drawn(row, *self._noise.draw(self._state))

    def integers(self, row: int, round_seed: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns the noise of a round on the grid of its secure sum.

        Args:
          row: Index of the round.
          round_seed: Public seed of the round's rotation, int64, shape [2].

        Returns:
          Integers modulo the grid's modulus, and the integer for the doubled count.
        """
        self.prepare(row)
        assert self._drawn is not None
        return self._noise.encode(self._drawn.noise, self._drawn.count, round_seed)

    def _keep(self, row: int) -> None:
        """Writes the state before a round, if there is past noise and the last one is old."""
        has_past = not isinstance(self._state.buffer, tuple)
        if self._path is None or not has_past or row < self._kept + _ROWS_BETWEEN_CHECKPOINTS:
            return
        arrays = [np.asarray(part) for part in tf.nest.flatten(self._state)]
        content = io.BytesIO()
        np.savez(content, *arrays)
        durable_files.write(
            self._path, self._digest(content.getvalue()) + content.getvalue(), private=True
        )
        self._kept = row

    def _read(self, path: pathlib.Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        digest, content = content[:32], content[32:]
        if digest != self._digest(content):
            return
        with np.load(io.BytesIO(content), allow_pickle=False) as loaded:
            arrays = [tf.constant(loaded[name]) for name in loaded.files]
        self._state = tf.nest.pack_sequence_as(self._state, arrays)
        self._kept = int(self._state.round_index)

    def _digest(self, content: bytes) -> bytes:
        """Returns the SHA-256 of a checkpoint and the seed that its noise comes from."""
        return hashlib.sha256(self._seed.tobytes() + content).digest()
