"""For all tests: no TFF worker is left behind, and no time goes into pictures and rubbish."""

import gc
import os
import pathlib
import sys

import pytest

from tff_dpftrl import pictures
from tff_dpftrl.execution import worker_watchdog

_write = pictures.write


def pytest_sessionstart(session):
    """TFF ends its worker in a destructor, which fails when the interpreter exits first."""
    del session
    worker_watchdog.start()
    gc.set_threshold(50_000, 20, 20)  # As in a command: graphs make many objects that stay.
    os.fsync = lambda descriptor: None  # No test cuts the power; a run has fifty of them.


def pytest_collection_finish(session):
    """Leaves modules and tests out of what rubbish is looked for in: a search took seconds."""
    del session
    gc.freeze()


def pytest_unconfigure(config):
    """Lets go of TFF's context, whose destructor prints a traceback once TFF's modules are gone."""
    del config
    if "tensorflow_federated" in sys.modules:
        from tff_dpftrl.execution import contexts

        contexts.let_go_at_exit()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leaves pictures empty in tests that are not about them: drawing took a fifth of all time."""
    is_about_pictures = item.get_closest_marker("pictures") is not None
    pictures.write = _write if is_about_pictures else _leave_empty


def _leave_empty(path, *_, private=False, **__):
    pathlib.Path(path).write_bytes(b"")
    if private:
        pathlib.Path(path).chmod(0o600)
