"""Tests that plans of TensorFlow 2.14 give the same updates with the TensorFlow that is installed.

`recorded_plans.npz` holds signed plans that TFF made with TensorFlow 2.14, what was sent to
devices, their updates, and the server's state before and after a round. `python -m
tests.runtime.plans.recorded_plans_test record` writes the file anew, in the environment of
`requirements/tff.lock`, for a change of the plans.
"""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.tasks import small_folder
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.plans import device_work, plan_pb2, server_work, signing, tensor_values
from tff_dpftrl.runtime.tasks import planned_task, task_folder, task_privacy
from verification import memory_store

_RECORD = pathlib.Path(__file__).with_name("recorded_plans.npz")
_KEYS = [ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key()]
_NUM_DEVICES = 3
# Updates are float32 of size 1, from fewer than 10³ operations: versions that add in other orders
# differ by the root of that number of roundings, 2e-6 at most, if errors are independent.
_APART = 1e-6


def _examples(recorded, name, device):
    return [bytes.fromhex(str(one)) for one in recorded[f"{name}/examples/{device}"]]


def _values(arrays):
    return np.frombuffer(tensor_values.to_bytes(arrays), np.uint8)


def _round(task, examples_of, state=None):
    """Runs a round; returns the state before it, the devices' updates, and the state after it."""
    server = server_work.ServerWork(signing.verified_task(task, _KEYS)[0])
    device = device_work.load(task.devices[0].SerializeToString(), _KEYS)
    if state is None:
        state = tensor_values.to_bytes(server.initialize())
    begun, sums = tensor_values.from_bytes(state, server.state), server.zero()
    sent = server.broadcast(begun)
    updates = [device.run(examples, sent) for examples in examples_of]
    for update in updates:
        sums = server.accumulate(sums, update)
    return state, updates, server.finish(begun, sums)[0]


@pytest.mark.parametrize("name", [pytest.param("linear", marks=pytest.mark.slow), "text"])
def test_plans_of_tensorflow_2_14_give_the_same_updates(name):
    with np.load(_RECORD) as recorded:
        task = plan_pb2.SignedTask.FromString(recorded[f"{name}/task"].tobytes())
        examples_of = [_examples(recorded, name, device) for device in range(_NUM_DEVICES)]
        _, updates, state = _round(task, examples_of, recorded[f"{name}/begun"].tobytes())
        plan = signing.verified_task(task, _KEYS)[0]
        for index, update in enumerate(updates):
            expected = tensor_values.from_bytes(
                recorded[f"{name}/update/{index}"].tobytes(), plan.update
            )
            for found, wanted in zip(update, expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=_APART, atol=_APART)
            assert any(np.abs(wanted).max() > 1e-2 for wanted in expected if wanted.size > 1)
        for index, array in enumerate(state):
            np.testing.assert_allclose(
                np.asarray(array), recorded[f"{name}/state/{index}"], rtol=_APART, atol=_APART
            )


def test_a_task_of_version_0_4_goes_on_with_noise_that_follows_from_its_state():
    with np.load(_RECORD) as recorded:
        signed = plan_pb2.SignedTask.FromString(recorded["text/task"].tobytes())
    server, devices = signing.verified_task(signed, _KEYS)
    terms = dataclasses.replace(small_folder.TERMS, server_plan=signed.server.sha256.hex())
    folder = task_folder.TaskFolder(_RECORD, signed, server, devices, terms, small_folder.CONFIG)
    assert folder.repeats_noise
    seen = participation_histograms.ObservedRounds(1, None, 1)
    stated = task_privacy.TaskPrivacy(terms).statement(seen)
    assert "as in version 0.4" in folder.with_caveat(stated).caveats[-1]
    rounds = small_folder.Rounds(planned_task.PlannedTask(folder), memory_store.MemoryStore())
    task, first = rounds.task.served.task, rounds.commit
    one, again = (
        task.server_step.apply(task.summation.zero(), 0, first.model, first.state) for _ in range(2)
    )
    assert one.model == again.model != first.model
    assert bytes(one.state) == bytes(again.state)
    assert rounds.add(one).rounds_done == 1


def _record():
    import tempfile

    from tests.runtime.plans import small_tasks
    from tests.runtime.tasks import tiny_task
    from tff_dpftrl.runtime.plans import building
    from tff_dpftrl.runtime.tasks import making

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tiny_task.write_corpora(folder)
        options = tiny_task.config(folder)
        made = making.make(options, folder / "task", small_tasks.KEY, progress=print)
        text = building.Plans(made.server, tuple(made.devices)).sign(small_tasks.KEY)
    linear = small_tasks.plans(small_tasks.ROUNDS["blt"]()).sign(small_tasks.KEY)
    content = {}
    for name, task, examples_of in (
        ("linear", linear, [small_tasks.examples(seed, seed + 2) for seed in range(3)]),
        ("text", text, tiny_task.examples()),
    ):
        begun, updates, state = _round(task, examples_of)
        content[f"{name}/begun"] = np.frombuffer(begun, np.uint8)
        content[f"{name}/task"] = np.frombuffer(task.SerializeToString(), np.uint8)
        for index, (examples, update) in enumerate(zip(examples_of, updates, strict=True)):
            content[f"{name}/examples/{index}"] = np.array([example.hex() for example in examples])
            content[f"{name}/update/{index}"] = _values(update)
        content |= {f"{name}/state/{index}": np.asarray(x) for index, x in enumerate(state)}
    np.savez_compressed(_RECORD, **content)


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        _record()
    else:
        sys.exit(pytest.main([__file__]))
