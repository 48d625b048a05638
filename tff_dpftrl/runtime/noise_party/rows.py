"""Noise of successive rounds, with the past noise that it depends on.

Each attempt gets new noise, drawn with fresh bits. Past noise is a function of the ledger, so that
a party that was killed draws the same again. A checkpoint saves time. It may be lost. It is used
only if it is undamaged and follows exactly the rows that the ledger has given before.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import secrets

import numpy as np
import tensorflow as tf

from tff_dpftrl import durable_files, validation
from tff_dpftrl.private_round import party_noise
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib

_ROWS_BETWEEN_CHECKPOINTS = 16
_ROW_BYTES = 8


class Rows:
    """Noise of a task's rounds; for one thread."""

    def __init__(
        self,
        noise: party_noise.PartyNoise,
        ledger: ledger_lib.Ledger,
        checkpoint: str | os.PathLike[str] | None = None,
    ):
        """Begins at the checkpoint, the file of secret past noise, if there is one.

        It raises ValueError if the ledger has rows that an earlier version has drawn otherwise.
        """
        if noise.is_reduced_tree and any(not any(one.entropy) for one in ledger.given()):
            raise validation.UsageError(
                "an earlier version has given noise of this tree with variance reduction, which "
                "this one draws in another way: go on with that version, or make the task anew."
            )
        self._noise, self._ledger = noise, ledger
        self._path = None if checkpoint is None else pathlib.Path(checkpoint)
        self._state = noise.initial_state(ledger.seed())
        self._drawn = b"", self._state  # Fresh bits of the last attempt, and the state after it.
        self._kept = 0  # Row of the state in the checkpoint.
        if self._path is not None:
            self._read(self._path)

    def prepare(self) -> None:
        """Makes the past noise that the next row depends on, before a group waits for it."""
        last = self._ledger.last()
        if last is None:
            return
        if last.entropy == self._drawn[0]:
            self._state = self._drawn[1]
        self._state = self._noise.before_round(self._state, last.row + 1, self._ledger.root)
        self._keep(last.row + 1)

    def integers(self, row: int, round_seed: np.ndarray) -> tuple[np.ndarray, int, bytes]:
        """Draws noise for one attempt at a round, on the grid of its secure sum.

        It is drawn when the attempt has begun, and used in no other: a copy of this process has no
        noise in store that it could give to another sum. `round_seed` is the public seed of the
        round's rotation, int64, shape [2].

        Returns integers modulo the grid's modulus, the integer for the doubled count, and the fresh
        bits to be written to the ledger before anything is sent.
        """
        self.prepare()
        entropy = secrets.token_bytes(ledger_lib.SEED_BYTES)
        root = self._ledger.seed(entropy)
        before = self._noise.before_round(self._state, row, lambda _: root)
        noise, count, after = self._noise.draw(before, root)
        self._drawn = entropy, after
        return (*self._noise.encode(noise, count, round_seed), entropy)

    def _keep(self, row: int) -> None:
        """Writes the state before a round, if there is past noise and the last one is old."""
        has_past = not isinstance(self._state.buffer, tuple)
        if self._path is None or not has_past or row < self._kept + _ROWS_BETWEEN_CHECKPOINTS:
            return
        arrays = [np.asarray(part) for part in tf.nest.flatten(self._state)]
        file = io.BytesIO()
        file.write(row.to_bytes(_ROW_BYTES, "little"))
        np.savez(file, *arrays)
        content = file.getvalue()
        durable_files.write(self._path, self._digest(content) + content, private=True)
        self._kept = row

    def _read(self, path: pathlib.Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        digest, content = content[:32], content[32:]
        if digest != self._digest(content):
            return
        with np.load(io.BytesIO(content[_ROW_BYTES:]), allow_pickle=False) as loaded:
            arrays = [tf.constant(loaded[name]) for name in loaded.files]
        self._state = tf.nest.pack_sequence_as(self._state, arrays)
        self._kept = int(self._state.round_index)

    def _digest(self, content: bytes) -> bytes:
        """Returns the SHA-256 of a checkpoint and of all that its noise comes from."""
        row = int.from_bytes(content[:_ROW_BYTES], "little")
        given = [(one.row, one.entropy) for one in self._ledger.given() if one.row < row]
        before = self._ledger.seed().tobytes() + repr(given).encode()
        return hashlib.sha256(before + content).digest()
