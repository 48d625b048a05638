"""Folders that are made once per session, for all workers of pytest-xdist."""

import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable

import pytest


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]
) -> pathlib.Path:
    """Returns the folder of this name, made by the first worker that asks; others wait for it.

    Tests only read it. One that changes files copies it first, with `shutil.copytree`.

    Args:
      tmp_path_factory: Pytest's.
      name: Name of the folder; stands for what `make` writes.
      make: Given the path of the folder, which is not there, makes and fills it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    folder.parent.mkdir(exist_ok=True)
    finished = folder.with_suffix(".finished")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # Of a `make` that failed.
            make(folder)
            finished.touch()
    return folder
