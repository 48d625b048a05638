"""Checkpoints of a run's state: complete, atomic, and secret.

A checkpoint holds everything that training needs to go on as if nothing had
happened: past noise, or the seeds to draw it again, included. Whoever reads it can subtract
that noise: the files are readable by their owner only and are not for publishing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, BinaryIO

import numpy as np
import tree

from tff_dpftrl import array_files, durable_files, json_text, validation

_SAVED = "saved"
_MAX_THREADS = 8
_BYTES_PER_THREAD = 8_000_000  # Below that, starting a thread costs more than it hashes.


class CheckpointError(validation.UsageError):
    """A checkpoint cannot be read or does not fit the run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """State taken apart into its tensors, each of which is hashed only once; they are not copied.

    Paths are like "aggregator/noise/0"; tensors have their order. `known_digests` has those of
    tensors that were hashed already.
    """

    paths: tuple[str, ...]
    tensors: tuple[np.ndarray, ...]
    known_digests: tuple[bytes, ...] | None = None

    @classmethod
    def of(cls, state: Any) -> Snapshot:
        """Makes a snapshot of a nested structure of arrays and numbers."""
        leaves = tree.flatten_with_path(state)
        paths = tuple("/".join(map(str, path)) for path, _ in leaves)
        return cls(paths, tuple(np.asarray(leaf) for _, leaf in leaves))

    @functools.cached_property
    def _digests(self) -> tuple[bytes, ...]:
        if self.known_digests is not None:
            return self.known_digests
        useful = sum(tensor.nbytes for tensor in self.tensors) // _BYTES_PER_THREAD
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), useful)
        if threads <= 1:
            return tuple(map(_digest, self.tensors))
        with futures.ThreadPoolExecutor(threads) as pool:
            return tuple(pool.map(_digest, self.tensors))

    def part(self, name: str) -> list[np.ndarray]:
        """Returns the tensors of one part of the state, like "aggregator"."""
        return [
            tensor
            for path, tensor in zip(self.paths, self.tensors, strict=True)
            if _is_within(path, name)
        ]

    def _shapes(self) -> Iterator[tuple[str, str]]:
        """Yields the path of each tensor, and its type and shape."""
        for path, tensor in zip(self.paths, self.tensors, strict=True):
            yield path, f"{tensor.dtype}{list(tensor.shape)}"

    def fingerprint(self, *, part: str = "", binding: str = "") -> str:
        """Computes the BLAKE2b digest (hex, 32 characters) of the state.

        It depends on values, types, shapes and order of the tensors. `part` names the part that is
        covered, like "aggregator"; all parts if empty. `binding` is text that is covered besides,
        like the digest of a manifest.
        """
        digests = zip(self.paths, self._digests, strict=True)
        return _fingerprint((digest for path, digest in digests if _is_within(path, part)), binding)

    def in_structure_of(self, template: Any, *, by_name: bool = False) -> Any:
        """Puts the tensors together again, in the structure of another state (`template`).

        Tensors of other shapes or types are refused. `by_name` also refuses other paths; other
        versions of TFF may have other names.
        """
        pairs = itertools.zip_longest(self._shapes(), Snapshot.of(template)._shapes())
        for saved, expected in pairs:
            if saved is None or expected is None or saved[not by_name :] != expected[not by_name :]:
                then, now = (" ".join(one or ("no more tensors",)) for one in (saved, expected))
                raise CheckpointError(
                    f"The checkpoint has {then} where the state of this run's model, optimizer and "
                    f"mechanism has {now}: resume with what the run began with. If that was "
                    "version 0.4, finish it with version 0.4."
                )
        return tree.unflatten_as(template, self.tensors)


def has_later_rounds(folder: pathlib.Path) -> bool:
    """Returns whether a folder, which may be missing, has a checkpoint after round 0."""
    return any(not path.name.startswith("round_00000000_") for path in folder.glob("round_*.npz"))


def without_values(state: Any) -> Any:
    """Returns a template for `Snapshot.in_structure_of` that takes no memory: all values are 0."""

    def zeros(leaf: Any) -> np.ndarray:
        tensor = np.asarray(leaf)
        return np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)

    return tree.map_structure(zeros, state)


def _fingerprint(digests: Iterable[bytes], binding: str) -> str:
    bound = hashlib.blake2b(binding.encode("utf-8"), digest_size=32).digest()
    return hashlib.blake2b(b"".join([bound, *digests]), digest_size=16).hexdigest()


def _digest(tensor: np.ndarray) -> bytes:
    digest = hashlib.blake2b(f"{tensor.dtype.str}{tensor.shape}".encode(), digest_size=32)
    digest.update(_bytes(tensor))
    return digest.digest()


def _bytes(tensor: np.ndarray) -> memoryview:
    """Returns the bytes of a tensor in C order, without a copy if they lie in this order."""
    return np.asarray(tensor, order="C").reshape(-1).view(np.uint8).data


def _is_within(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(part + "/")


class CheckpointFolder:
    """Checkpoints of one run: the one that the ledger committed to, and the next one.

    A file's name holds the number of rounds done and the fingerprint of the
    state, which is what the ledger commits to.
    """

    def __init__(self, folder: pathlib.Path, *, binding: str = "", older: Sequence[str] = ()):
        """Names the folder, which is made when the first checkpoint is saved.

        `binding` is text that every fingerprint covers besides the state, like the digest of the
        run's manifest. With another one no checkpoint can be read, except with one of `older`:
        the bindings of runs of earlier versions, which keep theirs.
        """
        self.folder = folder
        self._binding = binding
        self._older = tuple(older)

    def _path(self, rounds_done: int, fingerprint: str) -> pathlib.Path:
        return self.folder / f"round_{rounds_done:08d}_{fingerprint}.npz"

    def save(self, rounds_done: int, snapshot: Snapshot, saved: Mapping[str, Any]) -> str:
        """Writes a checkpoint atomically, beside the older ones, and returns its fingerprint."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # The state is hashed while it is written, since the name is needed last.
        with futures.ThreadPoolExecutor(1) as pool:
            fingerprint = pool.submit(snapshot.fingerprint, binding=self._binding)

            def name() -> str:
                return self._path(rounds_done, fingerprint.result()).name

            with durable_files.naming(self.folder, name, private=True) as file:
                _write(file, snapshot, saved)
        return fingerprint.result()

    def keep_only(self, rounds_done: int, fingerprint: str) -> None:
        """Removes all checkpoints but one; call it when the ledger has committed to that."""
        kept = self._path(rounds_done, fingerprint)
        for path in self.folder.glob("round_*.npz"):
            if path != kept:
                path.unlink()

    def load(
        self,
        rounds_done: int,
        fingerprint: str,
        is_wanted: Callable[[str], bool] = lambda path: True,
    ) -> tuple[Snapshot, dict[str, Any]]:
        """Reads a checkpoint and the values kept with it; verifies all of it by its fingerprint.

        `is_wanted` says which tensors are returned, by path. The others are in memory one at a
        time. A file that is missing, damaged, or of a run with another binding raises
        CheckpointError.
        """
        path = self._path(rounds_done, fingerprint)
        arrays: dict[str, np.ndarray] = {}
        digests: dict[str, bytes] = {}
        try:
            validation.file_in(self.folder, path.name, max_bytes=None)
            for name, array in array_files.each(path):
                if name == _SAVED or is_wanted(name.partition("/")[2]):
                    arrays[name] = array
                if name != _SAVED:
                    digests[name] = _digest(array)
                del array  # Before the next one is read.
            saved = json_text.parse(str(arrays.pop(_SAVED)))
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"Cannot read the checkpoint {path} that the ledger names as the last one: "
                f"{str(error).rstrip('.')}. The run cannot go on from an older one without "
                "releasing rounds twice."
            ) from error
        names = sorted(digests)
        in_order = [digests[name] for name in names]
        bindings = (self._binding, *self._older)
        bound = next((one for one in bindings if _fingerprint(in_order, one) == fingerprint), None)
        if bound is None:
            raise CheckpointError(
                f"The checkpoint {path} is damaged, or was saved under other options, or by a "
                "version of this package with other noise: its fingerprint differs."
            )
        self._binding = bound
        names = [name for name in names if name in arrays]
        snapshot = Snapshot(
            paths=tuple(name.partition("/")[2] for name in names),
            tensors=tuple(arrays[name] for name in names),
            known_digests=tuple(digests[name] for name in names),
        )
        return snapshot, saved


def _write(file: BinaryIO, snapshot: Snapshot, saved: Mapping[str, Any]) -> None:
    """Does what `numpy.savez` does, but copies no tensor."""
    tensors = {_SAVED: np.array(json.dumps(saved))}
    for i, (path, tensor) in enumerate(zip(snapshot.paths, snapshot.tensors, strict=True)):
        tensors[f"{i:04d}/{path}"] = np.asarray(tensor, order="C")
    with zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            header = np.lib.format.header_data_from_array_1_0(tensor)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, header)
                entry.write(_bytes(tensor))
