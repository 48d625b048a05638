"""Digests of the rows of a store, by which damage is noticed before a damaged row is used.

Each committed round has a SHA-256 digest of what it wrote and of the previous round's digest: a
chain. No single row of a task can change, be lost or be replaced by an older one unnoticed. A
digest has no key: it finds accidents, like those of a disk. Whoever can write the store can write
digests too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from tff_dpftrl.runtime.store import contents

_NO_METRICS = "{}"
_ROUND = (
    "population",
    "task",
    "round",
    "epoch",
    "committed_at",
    "metrics",
    "model_digest",
    "state_digest",
)


class DamagedRow(Exception):
    """A row is not what was written; the message names it, within a sentence."""


def digest(kind: str, *values: Any) -> str:
    """Computes the digest of values of a kind; values of two kinds have different digests.

    It is SHA-256 over the number, the types, the lengths and the contents of the values, as written
    or as a database returns them, in hexadecimal.
    """
    hashed = hashlib.sha256(b"tff_dpftrl store\0")
    for value in (kind, len(values), *values):
        tag, content = _encoded(value)
        hashed.update(tag + struct.pack(">Q", len(content)))
        for part in contents.parts_of(content):
            hashed.update(part)
    return hashed.hexdigest()


def _encoded(value: Any) -> tuple[bytes, contents.Serialised]:
    if isinstance(value, str):
        return b"s", value.encode()
    if isinstance(value, int):
        return b"i", str(value).encode()
    if isinstance(value, float):
        return b"f", struct.pack(">d", value)
    if isinstance(value, memoryview):
        return b"b", value.cast("B")
    return (b"n", b"") if value is None else (b"b", value)


def content_digests(model: contents.Serialised, state: contents.Serialised) -> dict[str, str]:
    """Computes the digests of a serialised model and of an aggregator's state, by column."""
    return {"model_digest": digest("model", model), "state_digest": digest("state", state)}


def task_digest(population: str, task: str, model_digest: str, state_digest: str) -> str:
    """Computes the first digest of a task's chain, before any round."""
    return digest("task", population, task, model_digest, state_digest)


def round_digest(row: Mapping[str, Any], previous: str) -> str:
    """Computes the digest of a round from its row and the digest of the previous round.

    The task's first digest is before the first round. Columns that it does not cover are ignored.
    """
    return digest("round", *(row[name] for name in _ROUND), previous)


def lease_digest(population: str, owner: str, epoch: int, expires_at: float) -> str:
    """Computes the digest of a lease."""
    return digest("lease", population, owner, epoch, expires_at)


def check_lease(row: Any) -> None:
    """Checks that a row of the table of leases matches its digest (`DamagedRow`)."""
    if row.digest != lease_digest(row.population, row.owner, row.epoch, row.valid_until):
        raise DamagedRow(
            f"the lease of the population {row.population!r:.200} is not what was written"
        )


def check_content(head: Any, name: str, content: contents.Serialised) -> None:
    """Checks model or state of a task's last commit against its digest (`DamagedRow`).

    `head` is the row of the table of commits, checked already; `name` is "model" or "state".
    """
    if digest(name, content) != head._mapping[f"{name}_digest"]:
        raise DamagedRow(
            f"the {name} of {_task_clause(head)} after round {head.rounds_done} is not what "
            "was committed"
        )


def check_epoch(head: Any, epoch: int) -> None:
    """Checks that the last commit is not of a later epoch than the last lease (`DamagedRow`).

    The epoch is 0 if there is no lease.
    """
    if head.epoch > epoch:
        raise DamagedRow(
            f"the lease of the population {head.population!r:.200} is older than its last commit"
        )


def check_count(head: Any) -> None:
    """Checks that the number of rounds in a task's last commit is an integer (`DamagedRow`)."""
    if not isinstance(head.rounds_done, int):
        raise DamagedRow(f"the number of rounds of {_task_clause(head)} is not what was written")


def check_rounds(head: Any, rows: Iterable[Any], *, start: int = 0) -> None:
    """Checks rounds of a task from `start` to the last one, and its last commit (`DamagedRow`).

    With `start` above 0 the first row is trusted: the chain is checked from its digest on. A round
    must not be missing, and the last commit must fit the last round.
    """
    check_count(head)
    last = None
    for index, row in enumerate(rows, start):
        previous = head.first_digest if last is None else last.digest
        is_trusted = last is None and start > 0
        if row.round != index or not (
            is_trusted or row.digest == round_digest(row._mapping, previous)
        ):
            raise DamagedRow(
                f"round {index + 1} of {_task_clause(head)} is missing or not what was committed"
            )
        last = row
    actual = (head.rounds_done, head.epoch, head.metrics, head.digest)
    if last is None:
        first = task_digest(head.population, head.task, head.model_digest, head.state_digest)
        expected = (0, 0, _NO_METRICS, first, first)
        actual = (*actual, head.first_digest)
    else:
        expected = (last.round + 1, last.epoch, last.metrics, last.digest)
        expected = (*expected, last.model_digest, last.state_digest)
        actual = (*actual, head.model_digest, head.state_digest)
    if digest("head", *actual) != digest("head", *expected):
        raise DamagedRow(
            f"the last commit of {_task_clause(head)} is not what was written with its last round"
        )


def _task_clause(head: Any) -> str:
    return f"the task {head.task!r:.200} of the population {head.population!r:.200}"
