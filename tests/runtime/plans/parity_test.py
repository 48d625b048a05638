"""Tests that rounds of a plan equal those of the simulation, with devices that have no TFF."""

import subprocess
import sys

import numpy as np
import pytest
import tree

from tests.runtime.plans import small_tasks
from tff_dpftrl.execution import client_part, compiled_process, federated_round
from tff_dpftrl.runtime.plans import device_work, server_work, signing, tensor_values

# By default, `wire_parity_test` and `summations_test` compare rounds with the simulation's.
pytestmark = pytest.mark.slow
_NUM_ROUNDS = 3


def _cohort(round_index):
    """Returns seed and number of examples of each device."""
    return [(10 * round_index + device, device) for device in (1, 0, 5)]


def _loaded(process):
    task = small_tasks.plans(process).sign(small_tasks.KEY)
    server, _ = signing.verified_task(task, small_tasks.KEYS)
    device = device_work.load(task.devices[0].SerializeToString(), small_tasks.KEYS)
    return device, server_work.ServerWork(server)


def _round(device, server, state, cohort):
    """Runs a round in which every chunk of the simulation has a separate Aggregator."""
    sent = tensor_values.to_bytes(server.broadcast(state))
    total = None
    for chunk in client_part.chunks(len(cohort)):
        sums = server.zero()
        for seed, num_examples in cohort[chunk.start : chunk.stop]:
            broadcast = tensor_values.from_bytes(sent, device.broadcast)
            update = device.run(small_tasks.examples(seed, num_examples), broadcast)
            report = tensor_values.to_bytes(update)
            sums = server.accumulate(sums, tensor_values.from_bytes(report, server.plan.update))
        total = sums if total is None else server.merge(total, sums)
    state, metrics = server.finish(state, total)
    state = tensor_values.from_bytes(tensor_values.to_bytes(state), server.state)
    return state, metrics, total


def _assert_rounds_are_equal(process, device, server):
    is_own = isinstance(process, federated_round.FederatedRound)
    compile_ = compiled_process.CompiledProcess if is_own else compiled_process.compile_process
    compiled = compile_(process)
    state, reference = server.initialize(), compiled.initialize()
    for round_index in range(_NUM_ROUNDS):
        cohort = _cohort(round_index)
        state, metrics, _ = _round(device, server, state, cohort)
        output = compiled.next(reference, [small_tasks.dataset(*device) for device in cohort])
        reference = output.state
        for found, expected in zip(state, tree.flatten(reference), strict=True):
            np.testing.assert_array_equal(found, np.asarray(expected))
        for path, expected in tree.flatten_with_path(output.metrics):
            np.testing.assert_array_equal(metrics["/".join(map(str, path))], expected)
    assert any(np.any(weights != 0) for weights in server.weights(state).values())
    return metrics


def _of_tff(names):
    """Returns functions that make processes of TFF, by name."""
    pytest.importorskip("tensorflow_federated", reason="makes plans of TFF's processes")
    from tests.runtime.plans import tff_tasks

    return getattr(tff_tasks, names)


@pytest.mark.parametrize("name", small_tasks.ROUNDS)
def test_rounds_of_tff_are_those_of_the_simulation_bit_for_bit(name):
    process = _of_tff("PROCESSES")[name]()
    _assert_rounds_are_equal(process, *_loaded(process))


@pytest.mark.parametrize("name", small_tasks.SECURE_ROUNDS)
def test_secure_sums_of_tff_are_equal_integers(name):
    processes = _of_tff("SECURE_PROCESSES")
    from tff_dpftrl.execution import contexts

    with contexts.secure_sum_simulation():
        process = processes[name]()
        _assert_rounds_are_equal(process, *_loaded(process))


@pytest.mark.parametrize("name", small_tasks.ROUNDS)
def test_rounds_are_those_of_the_simulation_bit_for_bit(name):
    process = small_tasks.ROUNDS[name]()
    metrics = _assert_rounds_are_equal(process, *_loaded(process))
    assert any(label.startswith("client_work/train/") for label in metrics)


@pytest.mark.parametrize("name", small_tasks.SECURE_ROUNDS)
def test_secure_sums_are_equal_integers(name):
    process = small_tasks.SECURE_ROUNDS[name]()
    device, server = _loaded(process)
    _assert_rounds_are_equal(process, device, server)
    assert server.plan.secure_sums
    state = server.initialize()
    *_, total = _round(device, server, state, _cohort(1))
    for sums in total[-len(server.plan.secure_sums) :]:
        assert sums.dtype == np.int64


_ON_A_DEVICE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow_federated":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())

import pathlib
from cryptography.hazmat.primitives.asymmetric import ed25519
from tff_dpftrl.runtime.plans import device_work, plan_pb2, tensor_values

folder = pathlib.Path(sys.argv[1])
key = ed25519.Ed25519PublicKey.from_public_bytes((folder / "key").read_bytes())
work = device_work.load((folder / "plan").read_bytes(), [key])
broadcast = tensor_values.from_bytes((folder / "broadcast").read_bytes(), work.broadcast)
examples = [bytes.fromhex(line) for line in (folder / "examples").read_text().split()]
(folder / "update").write_bytes(tensor_values.to_bytes(work.run(examples, broadcast)))
try:
    import tensorflow_federated
except ImportError as error:
    print(error)
"""


def test_a_device_without_tff_computes_the_same_update(tmp_path):
    plans = small_tasks.plans(small_tasks.ROUNDS["blt"]())
    signed = plans.sign(small_tasks.KEY).devices[0].SerializeToString()
    server = server_work.ServerWork(plans.server)
    broadcast = server.broadcast(server.initialize())
    examples = small_tasks.examples(3, 4)
    (tmp_path / "key").write_bytes(small_tasks.KEYS[0].public_bytes_raw())
    (tmp_path / "plan").write_bytes(signed)
    (tmp_path / "broadcast").write_bytes(tensor_values.to_bytes(broadcast))
    (tmp_path / "examples").write_text("\n".join(example.hex() for example in examples))
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_DEVICE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "tensorflow_federated is blocked" in done.stdout
    here = device_work.load(signed, small_tasks.KEYS).run(examples, broadcast)
    assert (tmp_path / "update").read_bytes() == tensor_values.to_bytes(here)
