"""Checkpoints of a learning process: complete, atomic, and secret.

A checkpoint holds everything that training needs to go on as if nothing had
happened, the noise's seed and buffers included. Whoever reads it can subtract
the noise: the files are readable by their owner only and are not for publishing.
"""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tree

from tff_dpftrl import durable_files


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the run."""


def fingerprint(state: Any) -> str:
    """BLAKE2b digest (hex, 32 characters) of every tensor of a nested structure."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree.flatten(state):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class CheckpointFolder:
    """The checkpoints of one run: the one the ledger committed to, and the next one.

    A file's name holds the number of rounds done and the fingerprint of the
    state, which is what the ledger commits to.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def _path(self, rounds_done: int, state_fingerprint: str) -> pathlib.Path:
        return self._folder / f"round_{rounds_done:08d}_{state_fingerprint}.npz"

    def save(self, rounds_done: int, state: Any, metrics: Mapping[str, Any]) -> str:
        """Writes a checkpoint, atomically, beside those that are there.

        Args:
          rounds_done: Number of rounds that the state has seen.
          state: State of the learning process, any nested structure of arrays.
          metrics: What to report of the last round; JSON-compatible.

        Returns:
          The fingerprint of the state.

        Raises:
          OSError: If it cannot be written; the older checkpoints are untouched.
        """
        leaves = {f"leaf_{i:04d}": np.asarray(x) for i, x in enumerate(tree.flatten(state))}
        state_fingerprint = fingerprint(state)
        content = io.BytesIO()
        np.savez(content, metrics=np.array(json.dumps(metrics)), **leaves)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        durable_files.write(
            self._path(rounds_done, state_fingerprint), content.getvalue(), private=True
        )
        return state_fingerprint

    def keep_only(self, rounds_done: int, state_fingerprint: str) -> None:
        """Removes all checkpoints but one; call it when the ledger has committed to that.

        Args:
          rounds_done: Number of rounds that the state to keep has seen.
          state_fingerprint: What `save` returned for it.
        """
        kept = self._path(rounds_done, state_fingerprint)
        for path in self._folder.glob("round_*.npz"):
            if path != kept:
                path.unlink()

    def load(
        self, rounds_done: int, state_fingerprint: str, template: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint and verifies it against its fingerprint.

        Args:
          rounds_done: Number of rounds that the state has seen.
          state_fingerprint: What `save` returned.
          template: A state of the same structure, as from `process.initialize()`.

        Returns:
          The state, in the structure of `template`, and the metrics of its round.

        Raises:
          CheckpointError: If the file is missing or damaged, or was written by a
            run with another model, optimizer or mechanism.
        """
        path = self._path(rounds_done, state_fingerprint)
        try:
            with np.load(path, allow_pickle=False) as file:
                metrics = json.loads(str(file["metrics"]))
                leaves = [file[name] for name in sorted(file.files) if name != "metrics"]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"Cannot read the checkpoint {path} that the ledger names as the last one: {error}."
                " The run cannot go on from an older one without releasing noise twice."
            ) from error
        expected = [np.asarray(leaf) for leaf in tree.flatten(template)]
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in expected]:
            raise CheckpointError(
                f"The checkpoint {path} holds tensors of other shapes or types than this run's "
                "model, optimizer and mechanism; resume with the config that the run began with."
            )
        state = tree.unflatten_as(template, leaves)
        if fingerprint(state) != state_fingerprint:
            raise CheckpointError(f"The checkpoint {path} is damaged: its fingerprint differs.")
        return state, metrics
