"""A public, append-only log of plans and privacy statements.

The lines of a file are the leaves of a Merkle tree (RFC 6962, section 2.1). The keeper of the log
signs its size and root: a checkpoint. If the tree of the smaller of two signed checkpoints is not a
prefix of the larger one's, the keeper showed two logs. So anybody who keeps a checkpoint can find
out later that an entry was changed or removed. The log does not show what was never entered.

    checkpoint      name of the log, size, root, signature: a signed note (C2SP tlog-checkpoint)
    entries.jsonl   an entry a line: kind and SHA-256 of a file, what it is of, when it was entered
    files/          the files, by their SHA-256

Nothing in it is secret. Entries are written before the checkpoint that counts them. After a crash
there may be lines and files that no checkpoint counts; the next entry replaces them.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime import signing_keys

CHECKPOINT = "checkpoint"
"""Name of the file with the signed size and root."""
ENTRIES = "entries.jsonl"
"""Name of the file with an entry a line."""
FILES = "files"
"""Name of the folder with the files that were entered."""

_ED25519 = b"\x01"  # Type of a signature in signed notes.
_LOCK = ".lock"
_SHA256 = re.compile("[0-9a-f]{64}")
_PROOF = "tff_dpftrl inclusion proof 1"


class LogRefusedError(validation.UsageError):
    """Raised for a log, a checkpoint or a proof that does not hold; the message says why."""


# Merkle tree.


def leaf_hash(content: bytes) -> bytes:
    """Hashes an entry."""
    return hashlib.sha256(b"\x00" + content).digest()


def root_hash(leaves: Sequence[bytes]) -> bytes:
    """Computes the root over the hashes of entries (RFC 6962, section 2.1)."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    left = _left_part(len(leaves))
    return _node_hash(root_hash(leaves[:left]), root_hash(leaves[left:]))


def inclusion_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Returns the audit path of a leaf, from its sibling up (RFC 6962, section 2.1.1)."""
    if len(leaves) <= 1:
        return []
    left = _left_part(len(leaves))
    if index < left:
        return [*inclusion_path(leaves[:left], index), root_hash(leaves[left:])]
    return [*inclusion_path(leaves[left:], index - left), root_hash(leaves[:left])]


def root_by_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """Computes the root that an inclusion path leads to; None if the path's length is wrong."""
    if not 0 <= index < size:
        return None
    if size == 1:
        return None if path else leaf
    if not path:
        return None
    left = _left_part(size)
    if index < left:
        below = root_by_path(leaf, index, left, path[:-1])
        return below and _node_hash(below, path[-1])
    below = root_by_path(leaf, index - left, size - left, path[:-1])
    return below and _node_hash(path[-1], below)


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _left_part(size: int) -> int:
    """Returns the largest power of two below a size of at least 2."""
    return 1 << ((size - 1).bit_length() - 1)


# Checkpoints.


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Size and root of a log."""

    log_name: str  # Name of the log, which is that of its key, too.
    size: int  # Number of entries.
    root: bytes  # Root of the Merkle tree, 32 bytes.

    def sign(self, key: ed25519.Ed25519PrivateKey) -> str:
        """Returns the checkpoint as a signed note."""
        text = f"{self.log_name}\n{self.size}\n{_encode(self.root)}\n"
        signature = _key_hash(self.log_name, key.public_key()) + key.sign(text.encode())
        return f"{text}\n— {self.log_name} {_encode(signature)}\n"

    @classmethod
    def verified(cls, note: str, key: ed25519.Ed25519PublicKey, source: str) -> Checkpoint:
        """Reads a signed note, which may have further signatures, after verifying the key's.

        `source` is the name of its place, for messages. It raises `LogRefusedError` if it is no
        checkpoint that the key signed.
        """
        text, _, signatures = note.partition("\n\n")
        try:
            log_name, size, root = text.split("\n")[:3]
            checkpoint = cls(log_name, _size(size), base64.b64decode(root, validate=True))
        except ValueError:
            raise LogRefusedError(
                f"{source} is no checkpoint of a log: it cannot be read."
            ) from None
        key_hash = _key_hash(log_name, key)
        for line in signatures.splitlines():
            encoded = line.removeprefix(f"— {log_name} ")
            try:
                signature = base64.b64decode(encoded, validate=True)
                if encoded != line and signature[:4] == key_hash:
                    key.verify(signature[4:], f"{text}\n".encode())
                    return checkpoint
            except (ValueError, exceptions.InvalidSignature):
                continue
        raise LogRefusedError(
            f"{source} is not signed with the key of the log that was given: get the key from the "
            "log's keeper, not from where the log is."
        )


def check_name(log_name: str) -> str:
    """Raises ValueError for a name that is empty, or has spaces or a plus sign, as no note may."""
    if not log_name or "+" in log_name or any(part.isspace() for part in log_name):
        raise validation.UsageError(
            f"The name of a log has no spaces and no plus sign, got {log_name!r}: take one like "
            "example.org/keyboard."
        )
    return log_name


def _key_hash(log_name: str, key: ed25519.Ed25519PublicKey) -> bytes:
    named = log_name.encode() + b"\n" + _ED25519 + signing_keys.raw(key)
    return hashlib.sha256(named).digest()[:4]


def _size(text: str) -> int:
    """Reads a number as checkpoints have it: only one text means it."""
    if text != str(int(text)) or int(text) < 0:
        raise ValueError(f"{text!r} is no number of entries.")
    return int(text)


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


# Logs.


def _root(lines: Sequence[bytes]) -> bytes:
    return root_hash([leaf_hash(line) for line in lines])


@dataclasses.dataclass(frozen=True)
class Entry:
    """Entry of one file in a log."""

    kind: str  # Kind of the file: "server plan", "device plan", "terms" or "statement".
    of: str  # Names of population and task, or name of a run's folder.
    sha256: str  # SHA-256 of the file, hexadecimal.
    entered: str  # Time by the keeper's clock, UTC, ISO 8601; nobody vouches for it.

    def line(self) -> bytes:
        """Returns the line of the entry, without its end."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, sort_keys=True).encode()

    @classmethod
    def read(cls, line: bytes) -> Entry:
        """Reads what `line` returned. It may raise `LogRefusedError`: keepers can sign anything."""
        try:
            entry = cls(**json_text.parse(line))
            texts = all(isinstance(value, str) for value in vars(entry).values())
            if texts and _SHA256.fullmatch(entry.sha256):
                return entry
        except (TypeError, ValueError):
            pass
        raise LogRefusedError(
            f"The log has a line that is no entry, {line[:80]!r}, which its keeper signed: ask the "
            "keeper, or take a newer tff_dpftrl."
        )


@dataclasses.dataclass(frozen=True)
class Log:
    """A log that was verified."""

    path: pathlib.Path  # Folder of the log.
    checkpoint: Checkpoint  # Its size and root.
    lines: tuple[bytes, ...]  # Its entries as they are in the file.

    def entries(self) -> Iterator[Entry]:
        """Returns the entries in their order."""
        return map(Entry.read, self.lines)

    def place_of(self, content: bytes) -> int | None:
        """Returns the place of the entry of a file's content, from 0; None if it has none."""
        sha256 = hashlib.sha256(content).hexdigest()
        return next((k for k, entry in enumerate(self.entries()) if entry.sha256 == sha256), None)

    def missing_files(self) -> list[Entry]:
        """Returns the entries whose files are not in the log's folder.

        It raises `LogRefusedError` if a file there is not the one that was entered.
        """
        missing = []
        for entry in self.entries():
            file = self.path / FILES / entry.sha256
            if not file.exists():
                missing.append(entry)
                continue
            _checked(self.path, f"{FILES}/{entry.sha256}")
            if hashlib.sha256(file.read_bytes()).hexdigest() != entry.sha256:
                raise LogRefusedError(f"{file} was changed since it was entered.")
        return missing

    def check_continues(self, earlier: Checkpoint) -> None:
        """Refuses a log that does not begin with what an earlier, verified checkpoint counts.

        It raises `LogRefusedError` if the log has another name, is shorter, or has another
        beginning.
        """
        now = self.checkpoint
        if earlier.log_name != now.log_name:
            raise LogRefusedError(
                f"The earlier checkpoint is of the log {earlier.log_name}, not of {now.log_name}."
            )
        if earlier.size > now.size:
            raise LogRefusedError(
                f"The log has {now.size} entries where it had {earlier.size}: entries were "
                "removed, or this is an old copy."
            )
        if _root(self.lines[: earlier.size]) != earlier.root:
            raise LogRefusedError(
                f"The first {earlier.size} entries are not those of the earlier checkpoint: the "
                "log was rewritten. Both checkpoints together are the proof."
            )

    def prove(self, place: int) -> str:
        """Returns the proof that an entry is in the log, for whoever does not have the whole log.

        It is a text for `entry_by_proof`: the entry, its place (from 0), the hashes of its
        inclusion path, and the log's checkpoint.
        """
        leaves = [leaf_hash(line) for line in self.lines]
        path = [_encode(node) for node in inclusion_path(leaves, place)]
        head = [_PROOF, self.lines[place].decode(), str(place), *path]
        return "\n".join(head) + "\n\n" + (self.path / CHECKPOINT).read_text("utf-8")


def _checked(path: pathlib.Path, name: str) -> pathlib.Path:
    return validation.file_in(path, name, max_bytes=1 << 31, remedy="Get the log again.")


def read(path: str | os.PathLike[str], key: ed25519.Ed25519PublicKey) -> Log:
    """Reads a log after verifying its checkpoint, without lines that this does not count.

    It raises `LogRefusedError` if there is no log, or its entries are not what its key signed.
    """
    path = pathlib.Path(path)
    for name in (CHECKPOINT, ENTRIES):
        if not (path / name).exists():
            raise LogRefusedError(f"There is no log in {path}: {path / name} is missing.")
    try:
        note = _checked(path, CHECKPOINT).read_text("utf-8")
        lines = _checked(path, ENTRIES).read_bytes().split(b"\n")[:-1]
    except UnicodeDecodeError:
        raise LogRefusedError(f"{path / CHECKPOINT} is no checkpoint of a log.") from None
    checkpoint = Checkpoint.verified(note, key, str(path / CHECKPOINT))
    lines = tuple(lines[: checkpoint.size])
    if len(lines) < checkpoint.size or _root(lines) != checkpoint.root:
        raise LogRefusedError(
            f"The entries in {path} are not those of its checkpoint: one was changed or removed."
        )
    return Log(path, checkpoint, lines)


def append(
    path: str | os.PathLike[str],
    files: Sequence[tuple[Entry, bytes]],
    key: ed25519.Ed25519PrivateKey,
    log_name: str | None = None,
) -> list[Entry]:
    """Enters files into a log, which is made if it is not there; returns the new entries.

    What was entered before is passed over. `log_name` names a new log; None for one that is there.
    It raises `LogRefusedError` if the log is not what its key signed, and ValueError if another
    process enters files.
    """
    path = pathlib.Path(path)
    if log_name is None:
        read(path, key.public_key())  # Before a folder is made.
    else:
        check_name(log_name)
    (path / FILES).mkdir(parents=True, exist_ok=True)
    with (path / _LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Two that signed at once would prove that the keeper shows two logs.
            raise validation.UsageError(
                f"Another process enters files into the log {path}: try again when it has ended."
            ) from None
        return _append_alone(path, files, key, log_name)


def _append_alone(
    path: pathlib.Path,
    files: Sequence[tuple[Entry, bytes]],
    key: ed25519.Ed25519PrivateKey,
    log_name: str | None,
) -> list[Entry]:
    lines: list[bytes] = []
    if log_name is None:
        log = read(path, key.public_key())
        lines, log_name = list(log.lines), log.checkpoint.log_name
    elif (path / CHECKPOINT).exists():
        raise validation.UsageError(f"There is a log in {path}, with its name: leave out --name.")
    known = {Entry.read(line).sha256 for line in lines}
    new = []
    for entry, content in files:
        if entry.sha256 not in known:
            durable_files.write(path / FILES / entry.sha256, content)
            known.add(entry.sha256)
            new.append(entry)
    lines += [entry.line() for entry in new]
    durable_files.write(path / ENTRIES, b"".join(line + b"\n" for line in lines))
    note = Checkpoint(log_name, len(lines), _root(lines)).sign(key)
    durable_files.write(path / CHECKPOINT, note.encode())
    return new


def entry_by_proof(proof: str, content: bytes, key: ed25519.Ed25519PublicKey) -> Entry:
    """Returns the entry of a file after the proof (`Log.prove`) that it is in a log was verified.

    It raises `LogRefusedError` if the proof does not hold, or is of another file.
    """
    head, _, note = proof.partition("\n\n")
    checkpoint = Checkpoint.verified(note, key, "The end of the proof")
    try:
        title, line, place, *path = head.split("\n")
        nodes = [base64.b64decode(node, validate=True) for node in path]
        entry = Entry.read(line.encode())
        root = root_by_path(leaf_hash(line.encode()), int(place), checkpoint.size, nodes)
    except ValueError:
        title, root, entry = "", None, None
    if title != _PROOF or entry is None or root != checkpoint.root:
        raise LogRefusedError("The proof does not lead from its entry to the log's root.")
    if entry.sha256 != hashlib.sha256(content).hexdigest():
        raise LogRefusedError("The proof is of another file: its hash differs.")
    return entry
