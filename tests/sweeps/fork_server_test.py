"""Tests of tff_dpftrl.sweeps.fork_server."""

import os
import signal
import sys

import pytest

from tff_dpftrl import version
from tff_dpftrl.sweeps import fork_server

_PROGRAM = [sys.executable, "-m", "tff_dpftrl.cli.main"]


def test_other_programs_are_not_its_own(monkeypatch):
    monkeypatch.setattr(fork_server.subprocess, "Popen", None)  # Nothing is started.
    server = fork_server.ForkServer(0)
    assert server.start([sys.executable, "fake_train.py"], "log") is None
    server.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_cells_have_processes_of_their_own(tmp_path):
    logs = [tmp_path / name for name in ("first", "second", "third", "last")]
    for log in logs:
        log.write_text("before\n")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    server = fork_server.ForkServer(lock)
    try:
        good = server.start([*_PROGRAM, "--version"], str(logs[0]))
        bad = server.start([*_PROGRAM, "train", "--wrong"], str(logs[1]))
        assert (good.wait(), bad.wait()) == (0, 2)
        assert logs[0].read_text() == f"before\n{version.__version__}\n"
        assert "unknown option --wrong" in logs[1].read_text()
        stopped = server.start([*_PROGRAM, "calibrate", "--help"], str(logs[2]))
        os.kill(stopped._pid, signal.SIGSTOP)
        killed = stopped.poll() is None
        stopped.kill()
        assert stopped.wait() == (-signal.SIGKILL if killed else 0)
        assert server.start([*_PROGRAM, "--version"], str(logs[3])).wait() == 0
        server._process.kill()
        server._process.wait()
        assert server.start([*_PROGRAM, "--version"], str(logs[3])) is None
    finally:
        server.close()
        os.close(lock)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
