"""Keyed hashes that stand for user ids in the ledger.

The key is in a separate file beside the ledger, readable by its owner only.
Without it, a user id can be neither recovered from a ledger nor searched for in
it, even by someone who can list all possible ids. Deleting the key after
training makes the pseudonyms meaningless for good. Whoever has both files can
test whether a given user took part, and when.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import secrets
from collections.abc import Iterable

from tff_dpftrl import durable_files, validation

_KEY_BYTES = 32


class Pseudonyms:
    """Map from user ids to 16-byte BLAKE2b hashes under one secret key."""

    def __init__(self, key: bytes):
        """Checks the key: a secret of 32 bytes from the operating system's CSPRNG."""
        if len(key) != _KEY_BYTES:
            raise validation.UsageError(f"key must have {_KEY_BYTES} bytes, got {len(key)}.")
        self._key = key

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Pseudonyms:
        """Draws a key and makes it durable in a file of mode 0600, which it replaces."""
        key = secrets.token_bytes(_KEY_BYTES)
        durable_files.write(path, key, private=True)
        return cls(key)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Pseudonyms:
        """Reads the key from a file that `create` wrote."""
        try:
            key = pathlib.Path(path).read_bytes()
        except FileNotFoundError:
            raise validation.UsageError(
                f"The key file {path} of the ledger is missing: without it earlier "
                "participations of a user cannot be found. Restore it, or start a new run."
            ) from None
        if len(key) != _KEY_BYTES:
            raise validation.UsageError(
                f"{path} is not a ledger key: it has {len(key)} bytes, not 32."
            )
        return cls(key)

    @property
    def check(self) -> str:
        """Hash of the key, by which a ledger recognises its key."""
        return hashlib.blake2b(b"", key=self._key, person=b"tff_dpftrl.check").hexdigest()

    def of(self, user_ids: Iterable[str]) -> list[bytes]:
        """Computes the pseudonyms, 16 bytes each, of distinct user ids, in order."""
        hashes = []
        for user_id in user_ids:
            if not isinstance(user_id, str):
                raise validation.UsageError(
                    f"user ids must be strings, got a {type(user_id).__name__}."
                )
            message = user_id.encode("utf-8", "surrogatepass")
            hashes.append(hashlib.blake2b(message, key=self._key, digest_size=16).digest())
        if len(set(hashes)) != len(hashes):
            raise validation.UsageError(
                "A user id appears twice in one cohort: list every user once."
            )
        return hashes
