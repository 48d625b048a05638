"""Checkpoints of a run's state: complete, atomic, and secret.

A checkpoint holds everything that training needs to go on as if nothing had
happened, the noise's seed and buffers included. Whoever reads it can subtract
the noise: the files are readable by their owner only and are not for publishing.
"""

from __future__ import annotations

import dataclasses
import functools
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

_SAVED = "saved"


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """A state taken apart into its tensors, each of which is hashed only once.

    Attributes:
      paths: Where each tensor is in the state, like "aggregator/noise/0".
      tensors: The tensors, in the same order; not copied.
    """

    paths: tuple[str, ...]
    tensors: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, state: Any) -> Snapshot:
        """Takes a nested structure of arrays and numbers apart."""
        found = tree.flatten_with_path(state)
        paths = tuple("/".join(map(str, path)) for path, _ in found)
        return cls(paths, tuple(np.asarray(leaf) for _, leaf in found))

    @functools.cached_property
    def _digests(self) -> tuple[bytes, ...]:
        digests = []
        for tensor in self.tensors:
            digest = hashlib.blake2b(f"{tensor.dtype.str}{tensor.shape}".encode(), digest_size=32)
            digest.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
            digests.append(digest.digest())
        return tuple(digests)

    def part(self, name: str) -> list[np.ndarray]:
        """The tensors of one part of the state, like "aggregator"."""
        return [
            tensor
            for path, tensor in zip(self.paths, self.tensors, strict=True)
            if _is_within(path, name)
        ]

    def fingerprint(self, *, part: str = "", binding: str = "") -> str:
        """BLAKE2b digest (hex, 32 characters) of the state.

        Args:
          part: Which part is covered, like "aggregator"; all if empty.
          binding: What is covered besides, like the digest of a manifest.

        Returns:
          The digest; it depends on values, types, shapes and order of the tensors.
        """
        digest = hashlib.blake2b(
            hashlib.blake2b(binding.encode("utf-8"), digest_size=32).digest(), digest_size=16
        )
        for path, tensor_digest in zip(self.paths, self._digests, strict=True):
            if _is_within(path, part):
                digest.update(tensor_digest)
        return digest.hexdigest()

    def in_structure_of(self, template: Any) -> Any:
        """Puts the tensors together again.

        Args:
          template: A state of the same structure, as from `process.initialize()`.

        Returns:
          The state, in the structure of `template`.

        Raises:
          CheckpointError: If `template` has tensors of other shapes or types.
        """
        expected = Snapshot.of(template).tensors
        if [(x.shape, x.dtype) for x in self.tensors] != [(x.shape, x.dtype) for x in expected]:
            raise CheckpointError(
                "The checkpoint holds tensors of other shapes or types than this run's "
                "model, optimizer and mechanism; resume with the config that the run began with."
            )
        return tree.unflatten_as(template, self.tensors)


def _is_within(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(part + "/")


class CheckpointFolder:
    """The checkpoints of one run: the one the ledger committed to, and the next one.

    A file's name holds the number of rounds done and the fingerprint of the
    state, which is what the ledger commits to.
    """

    def __init__(self, folder: pathlib.Path, *, binding: str = ""):
        """Names the folder; nothing is read or written.

        Args:
          folder: It is made when the first checkpoint is saved.
          binding: What every fingerprint covers besides the state, like the digest of
            the run's manifest: with another one no checkpoint can be read.
        """
        self.folder = folder
        self._binding = binding

    def _path(self, rounds_done: int, fingerprint: str) -> pathlib.Path:
        return self.folder / f"round_{rounds_done:08d}_{fingerprint}.npz"

    def save(self, rounds_done: int, snapshot: Snapshot, saved: Mapping[str, Any]) -> str:
        """Writes a checkpoint, atomically, beside those that are there.

        Args:
          rounds_done: Number of rounds that the state has seen.
          snapshot: State of the run.
          saved: What to keep with it, like the metrics of the last round;
            JSON-compatible.

        Returns:
          The fingerprint of the state.

        Raises:
          OSError: If it cannot be written; the older checkpoints are untouched.
        """
        fingerprint = snapshot.fingerprint(binding=self._binding)
        content = io.BytesIO()
        np.savez(
            content,
            **{_SAVED: np.array(json.dumps(saved))},
            **{
                f"{i:04d}/{path}": tensor
                for i, (path, tensor) in enumerate(
                    zip(snapshot.paths, snapshot.tensors, strict=True)
                )
            },
        )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        durable_files.write(self._path(rounds_done, fingerprint), content.getvalue(), private=True)
        return fingerprint

    def keep_only(self, rounds_done: int, fingerprint: str) -> None:
        """Removes all checkpoints but one; call it when the ledger has committed to that.

        Args:
          rounds_done: Number of rounds that the state to keep has seen.
          fingerprint: What `save` returned for it.
        """
        kept = self._path(rounds_done, fingerprint)
        for path in self.folder.glob("round_*.npz"):
            if path != kept:
                path.unlink()

    def load(self, rounds_done: int, fingerprint: str) -> tuple[Snapshot, dict[str, Any]]:
        """Reads a checkpoint and verifies it against its fingerprint.

        Args:
          rounds_done: Number of rounds that the state has seen.
          fingerprint: What `save` returned.

        Returns:
          The state, and what was kept with it.

        Raises:
          CheckpointError: If the file is missing or damaged, or belongs to a run with
            another binding.
        """
        path = self._path(rounds_done, fingerprint)
        try:
            with np.load(path, allow_pickle=False) as file:
                saved = json.loads(str(file[_SAVED]))
                names = sorted(name for name in file.files if name != _SAVED)
                snapshot = Snapshot(
                    tuple(name.partition("/")[2] for name in names),
                    tuple(file[name] for name in names),
                )
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"Cannot read the checkpoint {path} that the ledger names as the last one: {error}."
                " The run cannot go on from an older one without releasing noise twice."
            ) from error
        if snapshot.fingerprint(binding=self._binding) != fingerprint:
            raise CheckpointError(
                f"The checkpoint {path} is damaged, or was saved under other options, or by a "
                "version of this package with other noise: its fingerprint differs."
            )
        return snapshot, saved
