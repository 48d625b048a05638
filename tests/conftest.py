"""For all tests: no TFF worker is left behind, and no time goes into pictures and rubbish.

With --durations=N, the N tests are named that take the most processor time, which does not depend
on what else the machine does. A test's first fixtures count as its own.
"""

import gc
import os
import pathlib
import sys

import pytest

from tff_dpftrl import pictures
from tff_dpftrl.execution import worker_watchdog

_write = pictures.write
_BEGUN = pytest.StashKey[float]()
_GOAL = 1200  # Seconds of processor time for the default tests together.
_seconds: dict[str, float] = {}  # By test.


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
    item.stash[_BEGUN] = _processor_seconds()


def _processor_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":  # Reports have it with them, from the workers of pytest-xdist.
        report.processor_seconds = _processor_seconds() - item.stash[_BEGUN]
    return report


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        _seconds[report.nodeid] = report.processor_seconds


def pytest_terminal_summary(terminalreporter):
    number = terminalreporter.config.option.durations
    if number is not None:
        total = sum(_seconds.values())
        terminalreporter.section(f"processor time: {total:.0f} s (goal: {_GOAL} s)")
        for test in sorted(_seconds, key=_seconds.__getitem__, reverse=True)[: number or None]:
            terminalreporter.line(f"{_seconds[test]:.2f}s {test}")


def _leave_empty(path, *_, private=False, **__):
    pathlib.Path(path).write_bytes(b"")
    if private:
        pathlib.Path(path).chmod(0o600)
