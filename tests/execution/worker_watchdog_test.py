"""Tests that no worker outlives its parent, whatever ends the parent."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

# A stand-in for TFF's worker: a process of the same name that would sleep on.
_PARENT = textwrap.dedent("""
    import subprocess, sys, time
    from tff_dpftrl.execution import worker_watchdog
    worker_watchdog.start()
    worker = subprocess.Popen([sys.argv[1], "120"])
    other = subprocess.Popen(["sleep", "120"])
    time.sleep(1.5)
    print(worker.pid, other.pid, flush=True)
    time.sleep(120)
""")


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second while it is being read
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_and_only_workers_end_with_their_parent(tmp_path, how):
    worker_binary = tmp_path / "worker_binary"
    shutil.copy(shutil.which("sleep"), worker_binary)
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(worker_binary)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    worker, other = map(int, parent.stdout.readline().split())
    try:
        assert _is_running(worker) and _is_running(other)
        parent.send_signal(how)
        parent.wait()
        deadline = time.monotonic() + 30
        while _is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _is_running(worker)
        assert _is_running(other)
    finally:
        for pid in (worker, other):
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_children_do_not_inherit_an_ignored_interrupt():
    code = (
        "import signal, subprocess; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "from tff_dpftrl.execution import worker_watchdog; worker_watchdog.start(); "
        "child = subprocess.Popen(['sleep', '60']); child.send_signal(signal.SIGINT); "
        "assert child.wait(timeout=30) == -signal.SIGINT"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


_DROPPED_IN = textwrap.dedent("""
    import numpy as np, tensorflow_federated as tff, tff_dpftrl
    aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=1.0, clip_norm=1.0, clients_per_round=2
    )
    process = aggregator.create(tff.TensorType(np.float32, [2]))
    print(process.next(process.initialize(), []).result.shape)
    {last}
""")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize("last", ["pass", "raise ValueError"])
def test_the_pipe_of_a_program_in_tffs_own_context_ends_with_it(last):
    script = subprocess.Popen(
        [sys.executable, "-c", _DROPPED_IN.format(last=last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        output, errors = script.communicate(timeout=120)  # Ends only when all writers have.
    finally:
        try:
            os.killpg(script.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert output == "(2,)\n"
    assert "Exception ignored" not in errors
    assert script.returncode == {"pass": 0, "raise ValueError": 1}[last]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
