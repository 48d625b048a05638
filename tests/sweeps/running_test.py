"""Tests of tff_dpftrl.sweeps.running."""

import os
import sys
import time

import pytest

from tff_dpftrl.sweeps import cell_worker, running
from tff_dpftrl.sweeps import folder as folder_lib


@pytest.mark.parametrize(
    "log, reason",
    [
        (
            "tff-dpftrl train: warning: slow\ntff-dpftrl train: InternalError: a defect\n"
            "Every committed round is kept. Go on with:\n  tff-dpftrl train --resume\n",
            "tff-dpftrl train: InternalError: a defect",
        ),
        ("Killed\n", "Killed"),
        ("", "ended with status 70"),
    ],
)
def test_the_reason_of_a_failure_is_the_error_and_not_the_advice(tmp_path, log, reason):
    (tmp_path / folder_lib.LOG).write_text(log)
    assert running._why(tmp_path, 70) == reason


def test_a_process_that_was_ended_while_idle_runs_no_cell(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("")
    reader, writer = os.pipe()
    worker = cell_worker.CellWorker(reader, tmp_path / "log")
    try:
        worker.begin([sys.executable, "-I", str(program)], tmp_path / "log")
        while worker.status() is None:
            time.sleep(0.01)
        idle = {worker: 20}
        assert running._take(dict(idle), 20) is worker
        worker.kill()
        assert running._take(idle, 20) is None and not idle
    finally:
        worker.close()
        os.close(reader)
        os.close(writer)
