"""The server's part: what it refuses to add, and that a repeated round is the same round."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.plans import small_tasks
from tff_dpftrl.runtime.plans import device_work, graphs, server_work


@pytest.fixture(scope="module")
def blt():
    """Device and server of a task, a state, and an update."""
    return _ready(_skippable("blt"))


@pytest.fixture(scope="module")
def secagg():
    plans = small_tasks.plans(small_tasks.SECURE_ROUNDS["secagg"]())
    return _ready(plans)


def _ready(plans):
    server = server_work.ServerWork(plans.server)
    device = device_work.DeviceWork(plans.devices[0])
    state = server.initialize()
    return server, state, device.run(small_tasks.examples(1, 4), server.broadcast(state))


def test_a_repeated_finish_repeats_its_noise(blt):
    server, state, update = blt
    sums = server.accumulate(server.zero(), update)
    (one, metrics), (other, _) = (server.finish(state, sums) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["aggregator/noise_stddev"] == 0.5
    without_update, _ = server.finish(state, server.zero())
    assert not np.array_equal(server.weights(one)["trainable/0"], 0)
    assert not np.array_equal(server.weights(without_update)["trainable/0"], 0)  # Noise alone.


@functools.cache
def _skippable(name):
    return small_tasks.plans(
        small_tasks.ROUNDS[name](), private_round=small_tasks.AGGREGATIONS[name]().private_round
    )


def _by_label(server, state):
    return dict(zip([tensor.label for tensor in server.state], state, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "tree" else [])
        for name in small_tasks.AGGREGATIONS
    ],
)
def test_a_skipped_round_passes_over_its_noise_and_keeps_the_model(name):
    server = server_work.ServerWork(_skippable(name).server)
    before = server.finish(server.initialize(), server.zero())[0]
    after, again = server.skip(before), server.skip(before)
    for one, other in zip(after, again, strict=True):
        np.testing.assert_array_equal(one, other)
    released = _by_label(server, server.finish(before, server.zero())[0])
    kept, moved = _by_label(server, before), _by_label(server, after)
    for label, array in moved.items():
        is_noise = label.startswith("aggregator/") and "/clip/" not in label
        np.testing.assert_array_equal(array, (released if is_noise else kept)[label], label)
    assert moved["aggregator/round_index"] == 2
    # The noise of the next round is what it would have been.
    third = server.finish(after, server.zero())[0]
    expected = server.finish(server.finish(before, server.zero())[0], server.zero())[0]
    weights = [server.weights(state)["trainable/0"] for state in (before, after, third)]
    np.testing.assert_array_equal(weights[0], weights[1])
    second = server.finish(before, server.zero())[0]
    step = server.weights(expected)["trainable/0"] - server.weights(second)["trainable/0"]
    np.testing.assert_allclose(weights[2] - weights[1], step, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_round_of_secure_sums_alone():
    process = small_tasks.SECURE_ONLY_ROUNDS["secagg"]()
    plans = small_tasks.plans(process, secure_aggregation=small_tasks.SECURE_AGGREGATION)
    server, state, update = _ready(plans)
    one = server.accumulate(server.zero(), update)
    two = server.merge(one, server.merge(server.zero(), one))
    for total, array in zip(two, update, strict=True):
        np.testing.assert_array_equal(total, 2 * array.astype(np.int64))
    _, metrics = server.finish(state, two)
    (found,) = [value for name, value in metrics.items() if name.endswith("mse")]
    np.testing.assert_allclose(found, update[0] / update[1], rtol=1e-6)


def test_sums_are_not_changed_by_adding(blt):
    server, _, update = blt
    zero = server.zero()
    one = server.accumulate(zero, update)
    two = server.merge(one, one)
    np.testing.assert_array_equal(zero[-1], 0)
    np.testing.assert_array_equal(two[-1], 2 * one[-1])


def test_sums_that_need_not_be_kept_are_the_same_and_are_added_to_in_place(blt):
    server, _, update = blt
    kept = server.add(server.add(server.zero(), update), update)
    first = server.add(server.zero(), update, keeps_sums=False)
    other = server.add(first, update, keeps_sums=False)
    merged = server.merge(kept, kept)
    for index, (one, two) in enumerate(zip(kept, other, strict=True)):
        assert one.tobytes() == two.tobytes()
        assert two is first[index]
    changed = server.merge(other, kept, keeps_one=False)
    for one, two in zip(merged, changed, strict=True):
        assert one.tobytes() == two.tobytes()


def test_sums_are_those_of_the_plan_s_graphs(blt):
    server, _, update = blt
    generator = np.random.default_rng(0)
    updates = [
        [(array + generator.normal(size=array.shape)).astype(array.dtype) for array in update]
        for _ in range(5)
    ]
    accumulate, merge = (
        graphs.function_of(graph) for graph in (server.plan.accumulate, server.plan.merge)
    )
    sums, expected = server.zero(), [tf.constant(array) for array in server.zero()]
    for one in updates:
        sums = server.accumulate(sums, one)
        expected = accumulate(*expected, *map(tf.constant, one))
    sums, expected = server.merge(sums, sums), merge(*expected, *expected)
    for array, tensor in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())
        assert array.dtype == tensor.numpy().dtype


def test_integers_wrap_around_in_silence(secagg, recwarn):
    server = secagg[0]
    largest = np.iinfo(np.int64).max
    sums = [
        np.full_like(array, largest) if array.dtype == np.int64 else array
        for array in server.zero()
    ]
    wrapped = [array for array in server.merge(sums, sums) if array.dtype == np.int64]
    assert wrapped and all((array == -2).all() for array in wrapped)
    assert not recwarn.list


def test_nothing_stays_of_reports_that_were_added(blt):
    """With Python 3.11 something stays of every eager tensor, and a server adds for months."""
    server, _, update = blt

    def add(count):
        sums = server.zero()
        for _ in range(count):
            sums = server.merge(server.accumulate(sums, update), sums)
        return sys.getallocatedblocks()

    blocks = [add(100) for _ in range(4)]
    assert min(np.diff(blocks)) < 100  # Of a report, and a merger, less than one object.


def test_weights_can_be_taken_and_given(blt):
    server, state, _ = blt
    weights = {name: array + 1 for name, array in server.weights(state).items()}
    changed = server.with_weights(state, weights)
    for name, array in server.weights(changed).items():
        np.testing.assert_array_equal(array, weights[name])
    with pytest.raises(ValueError, match="weights must be"):
        server.with_weights(state, {"other": np.zeros(1)})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(blt, bad):
    server, _, update = blt
    poisoned = [array.copy() for array in update]
    poisoned[2][0, 0] = bad
    with pytest.raises(
        server_work.UpdateRefusedError, match="plain/update/update/0, is not finite"
    ):
        server.accumulate(server.zero(), poisoned)


def test_updates_of_another_shape_are_refused(blt):
    server, _, update = blt
    for wrong in (update[:-1], [*update[:-1], update[-1].astype(np.float16)], update[::-1]):
        with pytest.raises(server_work.UpdateRefusedError, match="update"):
            server.accumulate(server.zero(), wrong)


def test_integers_out_of_the_range_of_a_secure_sum_are_refused(secagg):
    server, _, update = secagg
    rules = list(server.plan.secure_sums)
    assert {rule.WhichOneof("rule") for rule in rules} == {"modulus"}
    server.accumulate(server.zero(), update)
    for entry in (-1, rules[-1].modulus):
        wrong = [array.copy() for array in update]
        wrong[-1][...] = entry
        with pytest.raises(server_work.UpdateRefusedError, match="integers outside"):
            server.accumulate(server.zero(), wrong)
