"""Tests that devices run verified plans, can be interrupted, and reveal nothing of examples."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.plans import plain_plans
from tff_dpftrl.runtime.plans import device_work, plan_pb2, signing, tensor_values

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def _load(*args, **options):
    signed = signing.sign(plain_plans.plan(*args, **options), _KEY)
    return device_work.load(signed.SerializeToString(), [_KEY.public_key()])


def test_an_update_is_computed_from_examples_and_broadcast():
    work = _load()
    for numbers in ([1.0, 2.5], []):
        total, count = work.run(plain_plans.examples(*numbers), plain_plans.SCALE)
        np.testing.assert_array_equal(total, np.float32(2 * sum(numbers)))
        np.testing.assert_array_equal(count, np.array([len(numbers)], np.int32))


def test_the_seconds_of_a_run_are_put_into_their_histogram():
    counts = lambda examples, scale: [scale, tf.one_hot(0, 3, dtype=tf.int32)]  # noqa: E731
    seconds = plan_pb2.Histogram(label="count", edges=[0.0, 1.0, 2.0])
    readings = iter([10.0, 11.5, 20.0, 20.5, 30.0, 99.0])
    plan = plain_plans.plan(counts, seconds=seconds)
    work = device_work.DeviceWork(plan, clock=lambda: next(readings))
    found = [work.run([], plain_plans.SCALE)[1] for _ in range(3)]
    assert [(array.tolist(), array.dtype) for array in found] == [
        ([0, 0, 1], np.int32), ([0, 1, 0], np.int32), ([0, 0, 1], np.int32)
    ]  # fmt: skip
    # Devices of earlier versions, which do not know the field, report no value.
    plan.ClearField("seconds")
    _, unknown = device_work.DeviceWork(plan).run([], plain_plans.SCALE)
    assert unknown.tolist() == [1, 0, 0]


def test_nothing_is_loaded_of_a_plan_that_was_changed(monkeypatch):
    signed = signing.sign(plain_plans.plan(), _KEY)
    content = bytearray(signed.SerializeToString())
    content[len(content) // 2] ^= 1
    monkeypatch.setattr(device_work, "DeviceWork", None)  # Whoever called it would fail.
    with pytest.raises(signing.PlanRefusedError, match="hash differs"):
        device_work.load(bytes(content), [_KEY.public_key()])


def test_a_broadcast_of_another_shape_is_refused():
    with pytest.raises(tensor_values.ValuesError, match="broadcast, scale, must be float32"):
        _load().run([], [np.zeros([2], np.float32)])


def test_more_examples_than_the_plan_takes_are_refused():
    with pytest.raises(ValueError, match="has 6 entries; the plan takes the newest 5"):
        _load().run(plain_plans.examples(*range(6)), plain_plans.SCALE)


def test_an_example_that_cannot_be_read_is_not_quoted():
    with pytest.raises(device_work.WorkFailedError) as caught:
        _load().run([b"my secret words"], plain_plans.SCALE)
    assert str(caught.value) == "The work failed: InvalidArgumentError."
    assert caught.value.__suppress_context__


def test_an_update_of_unknown_size_is_measured():
    work = _load(lambda examples, scale: [tf.zeros([tf.size(examples) * 500]), 0])
    work.run(plain_plans.examples(), plain_plans.SCALE)
    with pytest.raises(device_work.WorkFailedError, match="has 2004 bytes; the plan allows 1000"):
        work.run(plain_plans.examples(1.0), plain_plans.SCALE)


def _for_ever(examples, scale):
    count = tf.while_loop(lambda i: i < 10, lambda i: [(i + 1) % 10], [tf.size(examples)])
    return [scale, count[0]]


def test_work_that_takes_too_long_ends():
    limits = plan_pb2.Limits(memory_bytes=1_000_000, seconds=0.2, upload_bytes=1000)
    work = _load(_for_ever, limits=limits)
    with pytest.raises(device_work.WorkInterruptedError, match="took too long"):
        work.run([], plain_plans.SCALE)


def test_work_ends_when_the_device_is_no_longer_idle():
    work = _load(_for_ever)
    timer = threading.Timer(0.2, work.interrupt)
    timer.start()
    with pytest.raises(device_work.WorkInterruptedError):
        work.run([], plain_plans.SCALE)
    timer.join()
    work.interrupt()  # Nothing runs: nothing happens.


def test_a_graph_that_tensorflow_refuses_is_refused():
    plan = plain_plans.plan()
    graph_def = tf.compat.v1.GraphDef.FromString(plan.graph.graph_def)
    for node in graph_def.node:
        if node.op == "Identity":
            del node.input[:]
    plan.graph.graph_def = graph_def.SerializeToString()
    with pytest.raises(signing.PlanRefusedError, match="cannot be loaded: TensorFlow raises"):
        device_work.DeviceWork(plan)
