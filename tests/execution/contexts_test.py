"""Tests that contexts are entered for as long as asked, and by nothing but an entry point."""

import ast
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.execution import worker_watchdog

_PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "tff_dpftrl"


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def _sum(value):
    return tff.federated_sum(value)


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def _secure_sum(value):
    return tff.backends.mapreduce.federated_secure_modular_sum(value, 8)


def test_local_runs_computations_but_no_secure_sums():
    with execution.local():
        assert _sum([3, 4]) == 7
        with pytest.raises(ValueError, match="secure_sum_simulation"):
            execution.check_secure_sums()


def test_the_simulation_computes_secure_sums():
    with execution.secure_sum_simulation():
        execution.check_secure_sums()
        assert _secure_sum([3, 7]) == (3 + 7) % 8


def test_the_context_of_before_is_back_afterwards():
    stack = tff.framework.get_context_stack()
    before = stack.current
    with pytest.raises(KeyError), execution.secure_sum_simulation() as context:
        assert stack.current is context
        raise KeyError("A failure inside.")
    assert stack.current is before


def test_no_module_sets_the_global_context():
    # At exit, contexts.py does.
    for path in set(_PACKAGE.rglob("*.py")) - {_PACKAGE / "execution" / "contexts.py"}:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "_context" in source else ():
            name = getattr(node, "attr", getattr(node, "id", ""))
            assert not name.startswith("set_") or not name.endswith("_context"), path


def test_contexts_start_one_watchdog_in_all():
    with execution.local():
        first = worker_watchdog.start()
    with execution.local():
        assert worker_watchdog.start() is first


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "tff_dpftrl.execution.install_fast_state_transfer()",
        "with tff_dpftrl.execution.local(): pass",
    ],
)
def test_the_documented_lines_work_in_a_fresh_interpreter(line):
    code = (
        f"import tff_dpftrl\n{line}\n"
        "from tensorflow_federated.python.core.impl.executors import remote_executor\n"
        "create = remote_executor.RemoteExecutor.create_value\n"
        "assert create.__module__ == 'tff_dpftrl.execution.state_transfer', create.__module__\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.slow
def test_tffs_default_context_is_let_go_at_exit():
    code = (
        "import atexit\n"
        "from tff_dpftrl.execution import contexts, tff_names\n"
        "stack = tff_names.get_context_stack()\n"
        "atexit.register(lambda: print(type(stack.current).__name__))\n"  # The last one to run.
        "with contexts.compiled_only(): pass\n"
        "print(type(stack.current).__name__)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert completed.stdout.split() == ["SyncExecutionContext", "_CompiledOnly"], completed.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
