"""Atomic, durable writing of files and folders, by a temporary file that is renamed.

A crash, a full disk or a loss of power leaves the old content or the new one. A killed
process may leave a temporary file, which `remove_leftovers` removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import BinaryIO

_SUFFIX = ".unfinished"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[BinaryIO]:
    """Opens a new file that takes the place of `path` when the block ends without an error.

    The folder must exist. An existing file is replaced in one step, and unchanged if the disk is
    full or the folder not writable. With `private`, only the owner may read the file.
    """
    path = pathlib.Path(path)
    with naming(path.parent, lambda: path.name, private=private) as file:
        yield file


@contextlib.contextmanager
def naming(
    folder: str | os.PathLike[str], name: Callable[[], str], *, private: bool = False
) -> Iterator[BinaryIO]:
    """Opens a new file whose name is not known before it is written, like `replacing`.

    `name` is called once, when the whole content is on the disk. Other writers can open the file by
    its attribute `name`.
    """
    folder = pathlib.Path(folder)
    temporary = folder / f".{secrets.token_hex(8)}{_SUFFIX}"
    mode = 0o600 if private else 0o666
    file = open(temporary, "wb", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, mode))
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def write(path: str | os.PathLike[str], content: bytes, *, private: bool = False) -> None:
    """Writes a file in one step; arguments and errors are those of `replacing`."""
    with replacing(path, private=private) as file:
        file.write(content)


def append(path: str | os.PathLike[str], content: bytes) -> None:
    """Appends to a file that exists, and waits until the content is on the disk.

    A crash or an error may leave a part of the content: readers must be able to tell it from the
    whole.
    """
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[pathlib.Path]:
    """Makes a folder that gets its name when the block ends without an error.

    Within the block it is an empty folder beside `path`. With `replace`, it replaces an existing
    folder with all its content. A crash between two renamings may leave the old folder under a
    temporary name beside it; after an error the old one is unchanged.
    """
    path = pathlib.Path(path)
    new, old = (path.parent / f".{secrets.token_hex(8)}{_SUFFIX}" for _ in range(2))
    new.mkdir()
    try:
        yield new
        for file in new.rglob("*"):
            _sync(file)
        _sync(new)
        if replace and path.exists():
            os.rename(path, old)
        elif path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        try:
            os.rename(new, path)
        except BaseException:
            if old.exists():
                os.rename(old, path)
            raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Tries to hold a lock, free again when the process ends; yields whether this process holds it.

    The lock file is made, for the owner only, if missing.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.stat(path), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError as error:  # Of a file system without locks.
            raise OSError(error.errno, f"No lock: {error.strerror}", str(path)) from error
        yield is_ours  # Not if who held the lock before has removed its file.
    finally:
        os.close(descriptor)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes new names in a folder survive a loss of power."""
    _sync(folder)


def _sync(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_leftover(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file's name is that of a file that `remove_leftovers` removes."""
    name = pathlib.PurePath(path).name
    return name.startswith(".") and name.endswith(_SUFFIX)


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Removes temporary files of killed processes from a folder whose only writer is the caller."""
    for leftover in pathlib.Path(folder).glob(f".*{_SUFFIX}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
