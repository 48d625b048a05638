"""Threads of an operation are set before TensorFlow begins, for this machine's cores."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tff_dpftrl.execution import operation_threads

_CORES = len(os.sched_getaffinity(0))
_REPORT = "print(tf.config.threading.get_intra_op_parallelism_threads())"


def _run(program: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: TensorFlow reads the setting once."""
    start = "import tensorflow as tf; from tff_dpftrl import execution; "
    variables = {k: v for k, v in os.environ.items() if k != "TF_NUM_INTRAOP_THREADS"}
    return subprocess.run(
        [sys.executable, "-c", start + program], env=variables, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("clients_per_round", "expected"), [(1, _CORES), (10 * _CORES, 1)])
def test_clients_that_fill_the_cores_leave_one_thread(clients_per_round, expected):
    completed = _run(f"execution.limit_operation_threads({clients_per_round}); {_REPORT}")
    assert completed.stdout == f"{expected}\n", completed.stderr


@pytest.mark.slow
def test_the_environment_decides(monkeypatch):
    calls = []
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0)
    monkeypatch.setattr(
        tf.config.threading, "set_intra_op_parallelism_threads", lambda num: calls.append(num)
    )
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    operation_threads.limit_operation_threads(10 * _CORES)
    assert not calls
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS")
    operation_threads.limit_operation_threads(10 * _CORES)
    assert calls == [1]


@pytest.mark.slow
def test_too_late_is_an_error_unless_nothing_would_change():
    completed = _run("tf.zeros([]); execution.limit_operation_threads(100)")
    assert "call limit_operation_threads at the start of the program" in completed.stderr
    twice = 2 * "execution.limit_operation_threads(100); tf.zeros([]); "
    assert _run(twice + _REPORT).stdout == "1\n"


def test_clients_per_round_must_be_positive():
    with pytest.raises(ValueError, match="clients_per_round"):
        operation_threads.limit_operation_threads(0)
