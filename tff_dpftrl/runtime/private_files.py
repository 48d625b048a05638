"""Secret files, which one user of the machine may read: keys, tokens, the noise's seed."""

from __future__ import annotations

import os
import pathlib
import stat

from tff_dpftrl import validation


def check_owner_only(path: str | os.PathLike[str], what: str = "a private key") -> None:
    """Raises ValueError for a secret file whose mode lets other users read, write or execute it.

    `what` is the kind of file with its article, for the message.
    """
    mode = stat.S_IMODE(pathlib.Path(path).stat().st_mode)
    if mode & 0o077:
        raise validation.UsageError(
            f"{path} is {what} that others can use (mode {mode:04o}): run `chmod 600 {path}`, or "
            "make a new one if somebody may have read it."
        )


def read(path: str | os.PathLike[str], what: str = "a private key") -> bytes:
    """Reads a secret file; raises ValueError if there is none, or its mode lets other users in.

    `what` is the kind of file with its article, for the message.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        name = what.partition(" ")[2]
        raise validation.UsageError(f"There is no {name} at {path}: correct the path.") from None
    check_owner_only(path, what)
    return content


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder that only its owner may enter, and likewise the missing ones above it.

    `Path.mkdir` gives its mode to the last folder alone: those above it would be open to all. A
    folder that exists keeps its mode, which its owner has chosen.
    """
    path = pathlib.Path(path)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
