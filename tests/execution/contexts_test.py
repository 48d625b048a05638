"""Tests that contexts are entered for as long as asked, and by nothing but an entry point."""

import ast
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_dpftrl import execution

_PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "tff_dpftrl"
_PRIVATE_IMPORT = re.compile(r"^\s*(from|import) tensorflow_federated\.\w", re.MULTILINE)


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


def test_workers_do_not_inherit_an_ignored_interrupt():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with execution.local():
            assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_nothing_of_tff_is_used_that_is_not_public():
    for path in _PACKAGE.rglob("*.py"):
        assert not _PRIVATE_IMPORT.search(path.read_text(encoding="utf-8")), path
