"""Tests of `tff-dpftrl worker`: it says where it is, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tff_dpftrl.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a worker is guarded on Linux only")


@contextlib.contextmanager
def _started(*arguments):
    command = [sys.executable, "-m", "tff_dpftrl.cli.main", "worker", *arguments]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _address(child):
    line = child.stdout.readline()
    assert re.fullmatch(r"Worker ready at 127\.0\.0\.1:\d+\n", line)
    host, _, port = line.split()[-1].rpartition(":")
    return host, int(port)


def _is_open(address):
    try:
        with socket.create_connection(address, timeout=10):
            return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_its_worker(signum, status):
    with _started() as child:
        address = _address(child)
        assert _is_open(address)
        child.send_signal(signum)
        _, errors = child.communicate()
        assert child.returncode == status
        assert errors == "\ntff-dpftrl worker: interrupted.\n"
        assert not _is_open(address)


def test_its_worker_does_not_outlive_a_kill():
    with _started() as child:
        address = _address(child)
        child.kill()
        child.communicate()  # The worker would hold standard error open.
        deadline = time.monotonic() + 30
        while _is_open(address) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _is_open(address)


def test_it_ends_with_its_worker():
    with _started() as child:
        _address(child)
        (worker,) = (
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and _name_and_parent(pid) == ("worker_binary", child.pid)
        )
        os.kill(worker, signal.SIGKILL)
        _, errors = child.communicate()
    assert (child.returncode, errors) == (
        1,
        "tff-dpftrl worker: TFF's worker ended with status -9.\n",
    )


def _name_and_parent(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii") as file:
        name, _, rest = file.read().partition("(")[2].rpartition(")")
        return name, int(rest.split()[1])


def test_a_port_in_use_is_one_line():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with _started("--port", str(port)) as child:
            _, errors = child.communicate()
    assert child.returncode == 1
    assert f"port {port} cannot be used: Address already in use" in errors
    assert len(errors.splitlines()) == 2  # The first is empty.


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--port", "70000"], "--port 70000 is not a port"),
        (["--port", "-1"], "--port -1 is not a port"),
        (["--max-concurrent-clients", "0"], "--max-concurrent-clients 0 must be at least 1"),
    ],
)
def test_options_that_cannot_be(arguments, match, capsys):
    assert main.main(["worker", *arguments]) == 2
    assert match in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
