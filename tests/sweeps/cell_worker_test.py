"""Tests of tff_dpftrl.sweeps.cell_worker."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tff_dpftrl.sweeps import cell_worker

_PROGRAM = """
import os, sys, time
print("process", os.getpid(), *sys.argv[1:], sys.stdin.read())
print("error", file=sys.stderr)
match sys.argv[1]:
    case "handle":
        import signal
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    case "fail":
        sys.exit("it failed")
    case "raise":
        raise ValueError("a defect")
    case "hang":
        open(sys.argv[2], "w").close()
        time.sleep(600)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs the program in a worker, a new one if none is given; returns worker and log."""
    # For where the package is not installed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    reader, writer = os.pipe()
    workers = []

    def run(*arguments, worker=None, wait=True):
        log = tmp_path / f"{'-'.join(arguments)}.log".replace("/", "_")
        if worker is None:
            worker = cell_worker.CellWorker(reader, log)
            workers.append(worker)
        worker.begin([sys.executable, "-I", str(program), *arguments], log)
        while wait and worker.status() is None:
            time.sleep(0.01)
        return worker, log

    yield run
    for worker in workers:
        worker.close()
    os.close(reader)
    os.close(writer)


def test_one_process_runs_several_programs_each_with_its_log(start):
    worker, first = start("a")
    assert worker.status() == 0 and worker.can_run_another
    _, second = start("b", worker=worker)
    assert worker.status() == 0
    said = [log.read_text().split() for log in (first, second)]
    assert said[0] == ["process", said[1][1], "a", "error"]
    assert said[1][2:] == ["b", "error"]


def test_no_program_handles_the_signals_that_come_after_it(start):
    worker, _ = start("handle")
    assert worker.status() == 0
    worker.terminate()
    assert worker._process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("way, reason", [("fail", "it failed"), ("raise", "a defect")])
def test_a_process_in_which_something_failed_runs_nothing_else(start, way, reason):
    worker, log = start(way)
    assert worker.status() == 1 and not worker.can_run_another
    assert reason in log.read_text().splitlines()[-1]


@pytest.mark.parametrize("limit", ["_MOST_CELLS", "_MOST_BYTES"])
def test_a_process_that_is_large_or_has_run_many_runs_nothing_else(start, monkeypatch, limit):
    monkeypatch.setattr(cell_worker, limit, 1)
    worker, _ = start("a")
    assert worker.status() == 0 and not worker.can_run_another


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_says_by_what(start, tmp_path, signum):
    begun = tmp_path / "begun"
    worker, _ = start("hang", str(begun), wait=False)
    while not begun.exists():
        time.sleep(0.01)
    assert worker.status() is None
    worker.terminate() if signum == signal.SIGTERM else worker.kill()
    while worker.status() is None:
        time.sleep(0.01)
    assert worker.status() == -signum and not worker.can_run_another
