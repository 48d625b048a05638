"""The records of a run, read from its folder."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import math
import pathlib
import sqlite3
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from tff_dpftrl import json_text, validation

Json = dict[str, Any]
_PART = 1 << 18  # Entries of a tensor that are read at a time.


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Rows of `ledger.sqlite`.

    Attributes:
      declared: Declared number of rounds, smallest stride and largest number of participations.
      initial_checkpoint: Fingerprint of the state before round 0.
      rounds: Fingerprint of the state that each round continued from, fingerprint of its noise,
        and hash of its cohort.
      commits: Fingerprint of the state after each committed round, and smallest stride in it.
      asked: Numbers of the clients that each round asked.
      dropped: Numbers of the asked clients of each round that did not contribute.
      clients: Pseudonym, participations and last round of each client number, as the ledger
        counts them.
    """

    declared: tuple[int, int, int]
    initial_checkpoint: str
    rounds: dict[int, tuple[str, str | None, str]]
    commits: dict[int, tuple[str, int | None]]
    asked: dict[int, list[int]]
    dropped: dict[int, list[int]]
    clients: dict[int, tuple[bytes, int, int | None]]

    def turns(self) -> dict[int, list[int]]:
        """Returns each client's rounds, in order: those that asked it, unless it was dropped."""
        by_client: dict[int, list[int]] = {}
        for t in sorted(self.asked):
            for client in set(self.asked[t]) - set(self.dropped.get(t, ())):
                by_client.setdefault(client, []).append(t)
        return by_client

    def observed(self) -> tuple[int, int | None, int]:
        """Counts rounds begun, smallest stride (None if nobody came twice), most participations."""
        turns = self.turns().values()
        strides = [j - i for mine in turns for i, j in zip(mine, mine[1:], strict=False)]
        return len(self.rounds), min(strides, default=None), max(map(len, turns), default=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """Tensor of a state, which may be larger than what should be in memory.

    `parts` yields the entries in C order, as one-dimensional arrays.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> Tensor:
        """Makes a tensor of an array."""
        return cls(array.dtype, array.shape, lambda: iter([array.reshape(-1)]))

    def whole(self) -> np.ndarray:
        """Returns the array, for a small tensor."""
        return np.concatenate([np.zeros(0, self.dtype), *self.parts()]).reshape(self.shape)

    def digest(self) -> bytes:
        """Computes the digest of type, shape and entries."""
        digest = hashlib.blake2b(f"{self.dtype.str}{self.shape}".encode(), digest_size=32)
        for part in self.parts():
            digest.update(part.tobytes())
        return digest.digest()


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """State of the run, with the path of its file.

    `tensors` has pairs of a path in the state and a tensor, in the order of the file.
    """

    path: pathlib.Path
    tensors: tuple[tuple[str, Tensor], ...]

    def get(self, name: str) -> Tensor | None:
        """Returns the tensor at a path in the state; None if there is none."""
        return dict(self.tensors).get(name)

    @functools.cached_property
    def _digests(self) -> list[bytes]:
        return [tensor.digest() for _, tensor in self.tensors]

    def fingerprint(self, *, part: str = "", binding: str = "") -> str:
        """Computes the ledger's fingerprint of this state, or of a part, bound to `binding`."""
        whole = hashlib.blake2b(_digest(binding.encode("utf-8")), digest_size=16)
        for (name, _), digest in zip(self.tensors, self._digests, strict=True):
            if not part or name == part or name.startswith(f"{part}/"):
                whole.update(digest)
        return whole.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """The records of a run.

    Attributes:
      public: Content of `config.json`.
      manifest: Content of `private/manifest.json`; None, like all below, without the file.
      ledger: Rows of `private/ledger.sqlite`.
      checkpoint: State that the ledger names last.
      statement: Content of `privacy_statement.json`.
      statement_text: Content of `privacy_statement.md`.
      metrics: Rows of `private/metrics.csv`; of an older run, or without `private/`, those of
        `metrics.csv`.
      published_metrics: Rows of `metrics.csv`.
      unreadable: Sentences on the files that cannot be read.
      cohort_seed: Secret seed of the samples, from `private/cohort_seed`.
      pool: Number of examples of each user in the pool of ELS, from `private/pool.json`.
    """

    folder: pathlib.Path
    public: Json
    manifest: Json | None
    ledger: Ledger | None
    checkpoint: Checkpoint | None
    statement: Json | None
    statement_text: str | None
    metrics: list[dict[str, str]] | None
    published_metrics: list[dict[str, str]] | None
    unreadable: tuple[str, ...]
    cohort_seed: int | None = None
    pool: list[int] | None = None

    @property
    def config(self) -> Json:
        """The options of the run."""
        return self.public["config"]

    @property
    def derived(self) -> Json:
        """The values that the run derived from its options."""
        return self.public["derived"]

    @property
    def facts(self) -> Json:
        """The facts that the run found in its data."""
        return self.public["facts"]

    @property
    def has_custom_model(self) -> bool:
        """Whether `finetuning.custom_run` made it, with a custom model and custom examples."""
        return bool(self.config.get("own_model"))

    @property
    def num_users(self) -> int:
        """Number of training users."""
        if "training_users" in self.facts:
            return self.facts["training_users"]
        return self.derived["plan"]["num_users"]

    @property
    def rounds_done(self) -> int | None:
        """Number of committed rounds; None if that is not known."""
        return None if self.ledger is None else len(self.ledger.commits)

    @property
    def declared(self) -> tuple[int, int, int] | None:
        """Declared number of rounds, stride and participations; None if that is not known."""
        return None if self.ledger is None else self.ledger.declared

    @property
    def binding(self) -> str:
        """The private and full options, which every fingerprint of a state also covers."""
        content = {k: v for k, v in self.manifest.items() if k != "versions"}
        text = json.dumps(content, sort_keys=True).encode("utf-8")
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        return f"noise version {self.manifest['noise_version']}, {digest}"


def read(folder: pathlib.Path) -> Records:
    """Reads the records of a run, without a change; a folder open elsewhere is refused."""
    path = folder / "config.json"
    if not path.is_file():
        raise validation.UsageError(
            f"There is no run in {folder}: {path} does not exist. Name the folder that train or "
            "finetune wrote to, or the report of a served task that tff-dpftrl task report "
            "--records wrote."
        )
    unreadable: list[str] = []
    public = read_json(folder, path.name, unreadable)
    parts = ("config", "derived", "facts")
    if public is None or not all(isinstance(public.get(part), dict) for part in parts):
        raise validation.UsageError(
            f"{path} is not that of a run of train or finetune: a part is missing."
        )
    statement = read_json(folder, "privacy_statement.json", unreadable)
    if statement is not None and "selection_expected_runs" in statement.get("parameters", {}):
        raise validation.UsageError(
            f"The run in {folder} was chosen among several, and its records are with those of the "
            "others: name the folder that the sweep wrote to."
        )
    ledger = _ledger(folder, unreadable)
    pool = read_json(folder, "private/pool.json", unreadable)
    published = read_rows(folder, "metrics.csv", unreadable)
    exact = read_rows(folder, "private/metrics.csv", unreadable)
    return Records(
        folder=folder,
        public=public,
        manifest=read_json(folder, "private/manifest.json", unreadable),
        ledger=ledger,
        checkpoint=None if ledger is None else _checkpoint(folder, ledger, unreadable),
        statement=statement,
        statement_text=read_text(folder, "privacy_statement.md", unreadable),
        metrics=published if exact is None else exact,
        published_metrics=published,
        cohort_seed=_seed(folder, "private/cohort_seed", unreadable),
        pool=None if pool is None else pool.get("examples_of_users"),
        unreadable=tuple(unreadable),
    )


def _seed(folder: pathlib.Path, name: str, unreadable: list[str]) -> int | None:
    text = read_text(folder, name, unreadable)
    try:
        return None if text is None else int(text, base=16)
    except ValueError:
        unreadable.append(f"{name} is no hexadecimal number")
        return None


def read_text(
    folder: pathlib.Path, name: str | pathlib.PurePath, unreadable: list[str]
) -> str | None:
    """Reads a file of text; None if there is none, or if it is `unreadable`, which then says so."""
    try:
        if not (folder / name).exists():
            return None
        return validation.file_in(folder, str(name)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        unreadable.append(f"{name} cannot be read: {error}")
        return None


def read_json(
    folder: pathlib.Path, name: str | pathlib.PurePath, unreadable: list[str]
) -> Json | None:
    """Reads a JSON object, like `read_text`."""
    text = read_text(folder, name, unreadable)
    if text is None:
        return None
    try:
        content = json_text.parse(text)
    except ValueError as error:
        unreadable.append(f"{name} is no JSON: {error}")
        return None
    if not isinstance(content, dict):
        unreadable.append(f"{name} is no JSON object")
        return None
    return content


def read_rows(
    folder: pathlib.Path, name: str, unreadable: list[str]
) -> list[dict[str, str]] | None:
    """Reads the whole rows of a CSV file, like `read_text`."""
    text = read_text(folder, name, unreadable)
    if text is None:
        return None
    # A line without an end was cut short by a crash.
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def _ledger(folder: pathlib.Path, unreadable: list[str]) -> Ledger | None:
    path = folder / "private" / "ledger.sqlite"
    if not path.exists():
        return None
    where = f"file:{path.absolute().as_posix().replace('%', '%25').replace('?', '%3f')}?mode=ro"
    try:
        validation.file_in(folder, "private/ledger.sqlite", max_bytes=None)
        with contextlib.closing(sqlite3.connect(where, uri=True, timeout=1.0)) as connection:
            damage = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if damage != "ok":
                unreadable.append(f"{path.name} is damaged: {' '.join(damage.split())}")
            return _tables(connection)
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise validation.UsageError(
                f"The run in {path.parents[1]} is in use by another process: wait for it to end, "
                "or interrupt it."
            ) from None
        if "readonly" in str(error):
            raise validation.UsageError(
                f"The last process of the run in {path.parents[1]} was killed while it wrote the "
                "ledger: run tff-dpftrl report on it first, which takes back what was half written."
            ) from None
        unreadable.append(f"{path.name} cannot be read: {error}")
    except (sqlite3.Error, TypeError, ValueError) as error:
        unreadable.append(f"{path.name} cannot be read: {error}")
    return None


def _tables(connection: sqlite3.Connection) -> Ledger:
    def rows(query: str) -> list[tuple[Any, ...]]:
        return connection.execute(query).fetchall()

    def by_round(table: str) -> dict[int, list[int]]:
        clients: dict[int, list[int]] = {}
        for t, client in rows(f"SELECT round, client FROM {table} ORDER BY round, client"):
            clients.setdefault(t, []).append(client)
        return clients

    ((*declared, initial),) = rows(
        "SELECT num_rounds, min_sep, max_participations, initial_checkpoint FROM declared"
    )
    return Ledger(
        declared=tuple(declared),
        initial_checkpoint=initial,
        rounds={
            t: tuple(row)
            for t, *row in rows(
                "SELECT round, continues_checkpoint, noise_fingerprint, cohort_hash FROM rounds"
            )
        },
        commits={
            t: tuple(row)
            for t, *row in rows("SELECT round, checkpoint, smallest_stride FROM commits")
        },
        asked=by_round("asked"),
        dropped=by_round("dropped"),
        clients={
            client: tuple(row)
            for client, *row in rows(
                "SELECT client, pseudonym, participations, last_round FROM clients"
            )
        },
    )


def _checkpoint(folder: pathlib.Path, ledger: Ledger, unreadable: list[str]) -> Checkpoint | None:
    last = ledger.commits[max(ledger.commits)][0] if ledger.commits else ledger.initial_checkpoint
    name = f"round_{len(ledger.commits):08d}_{last}.npz"
    path = folder / "private" / "checkpoints" / name
    if not path.exists():
        return None
    try:
        validation.file_in(folder, path.relative_to(folder).as_posix(), max_bytes=None)
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if "/" in name)
        # "0006/aggregator/round_index.npy": the number is the tensor's place in the state.
        tensors = ((n.partition("/")[2].removesuffix(".npy"), _stored(path, n)) for n in names)
        state = Checkpoint(path, tuple(tensors))
        state.fingerprint()  # Reads all of it: what is damaged is found now.
        return state
    except Exception as error:  # NumPy and zipfile raise a dozen kinds.
        unreadable.append(f"{name} cannot be read: {error}")
        return None


def _stored(path: pathlib.Path, name: str) -> Tensor:
    """Returns a tensor of an archive of arrays, which is read anew whenever it is asked for."""

    @contextlib.contextmanager
    def opened() -> Iterator[tuple[tuple[int, ...], np.dtype, IO[bytes]]]:
        with zipfile.ZipFile(path) as archive, archive.open(name) as stream:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError(f"{name} is no array of version 1.0")
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
            if is_fortran or dtype.hasobject or min(shape, default=0) < 0:
                raise ValueError(f"{name} is no array of plain values in C order")
            yield shape, dtype, stream

    with opened() as (shape, dtype, _):
        pass

    def parts() -> Iterator[np.ndarray]:
        count = 0
        with opened() as (_, _, stream):
            while content := stream.read(_PART * dtype.itemsize):
                count += len(content)
                yield np.frombuffer(content, dtype)
        if count != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has another size than its header says")

    return Tensor(dtype, shape, parts)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
