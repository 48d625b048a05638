"""For all tests: no TFF worker is left behind, and no time goes into pictures and rubbish.

A default test may take ten seconds of processor time, which waiting does not use up. With
--durations=N, the N tests are named that take the most; a test's first fixtures count as its own
there.
"""

import gc
import os
import pathlib
import sys

import pytest

from tff_dpftrl import pictures

_write = pictures.write
_BEGUN = pytest.StashKey[float]()
_CALLED = pytest.StashKey[float]()
# Seconds of processor time for a default test without its fixtures: ten on quiet cores, to which
# busy ones add up to 80 %.
_LIMIT = 18.0
_seconds: dict[str, float] = {}  # By test.
# What .venv lacks: a test that needs one of them is skipped there, and runs in .venv-tff.
_OF_TFF = ("tensorflow_federated", "tensorflow_privacy")
_left_out: set[str] = set()


def pytest_addoption(parser):
    parser.addoption(
        "--goal", type=float, help="seconds of processor time for all tests; fails beyond twice it"
    )
    parser.addoption(
        "--left-out",
        type=pathlib.Path,
        help="file for the names of the tests that are skipped, for another environment to run",
    )


def pytest_sessionstart(session):
    del session
    # Garbage may be a gRPC channel of an earlier test. A fork lacks the threads that closing it
    # waits for, and would wait for ever.
    os.register_at_fork(after_in_child=gc.disable)
    gc.set_threshold(50_000, 20, 20)  # As in a command: graphs make many objects that stay.
    os.fsync = lambda descriptor: None  # No test cuts the power; a run has fifty of them.


def pytest_collection_finish(session):
    """Leaves modules and tests out of what rubbish is looked for in: a search took seconds."""
    del session
    gc.freeze()


def pytest_unconfigure(config):
    """TFF's destructors leave workers, and print tracebacks once TFF's modules are gone."""
    del config
    if "tensorflow_federated" in sys.modules:
        from tff_dpftrl.execution import contexts

        contexts.clean_up_at_exit()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leaves pictures empty in tests that are not about them: drawing took a fifth of all time."""
    is_about_pictures = item.get_closest_marker("pictures") is not None
    pictures.write = _write if is_about_pictures else _leave_empty
    item.stash[_BEGUN] = _processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.stash[_CALLED] = _processor_seconds()


def _processor_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo and getattr(call.excinfo.value, "name", None) in _OF_TFF:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {call.excinfo.value}")
    if call.when == "call" and report.passed and not item.get_closest_marker("slow"):
        seconds = _processor_seconds() - item.stash[_CALLED]
        longer = item.get_closest_marker("seconds")
        limit = longer.args[0] if longer else _LIMIT
        if seconds > limit:
            report.outcome = "failed"
            report.longrepr = (
                f"{seconds:.1f} s of processor time, where this default test may take {limit:.0f} "
                "s: make it cheaper, or mark it with pytest.mark.slow"
            )
    if call.when == "teardown":  # Reports have it with them, from the workers of pytest-xdist.
        report.processor_seconds = _processor_seconds() - item.stash[_BEGUN]
    return report


def pytest_runtest_logreport(report):
    _note_if_left_out(report)
    if report.when == "teardown":
        _seconds[report.nodeid] = report.processor_seconds


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed and any(
        f"No module named '{name}'" in str(report.longrepr) for name in _OF_TFF
    ):
        report.outcome, report.longrepr = "skipped", ("", 0, "Skipped: needs TFF")
    if report.skipped:  # Of the files that are skipped at one place, pytest-xdist reports one.
        report.longrepr = (str(collector.path), *report.longrepr[1:])
    return report


def pytest_collectreport(report):
    _note_if_left_out(report)


def _note_if_left_out(report):
    if report.skipped:
        _left_out.add(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    options = session.config.option
    if options.left_out and not hasattr(session.config, "workerinput"):
        options.left_out.parent.mkdir(exist_ok=True)
        options.left_out.write_text("".join(f"{name}\n" for name in sorted(_left_out)))
    if options.goal and sum(_seconds.values()) > 2 * options.goal:
        session.exitstatus = session.exitstatus or 1


def pytest_terminal_summary(terminalreporter):
    options = terminalreporter.config.option
    if options.durations is not None:
        goal = f" (goal: {options.goal:.0f} s, failed beyond twice it)" if options.goal else ""
        terminalreporter.section(f"processor time: {sum(_seconds.values()):.0f} s{goal}")
        dearest = sorted(_seconds, key=_seconds.__getitem__, reverse=True)
        for test in dearest[: options.durations or None]:
            terminalreporter.line(f"{_seconds[test]:.2f}s {test}")


def _leave_empty(path, *_, private=False, **__):
    pathlib.Path(path).write_bytes(b"")
    if private:
        pathlib.Path(path).chmod(0o600)
