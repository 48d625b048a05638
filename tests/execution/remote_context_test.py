"""Tests of rounds on TFF's own workers: the same model, and workers that are killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators, execution
from tff_dpftrl.execution import state_transfer, worker_process
from tff_dpftrl.mechanisms import blt

_FEATURES = 40
_COHORTS = (5, 4, 1, 0)  # With two workers, the last two leave one of them without work.


@pytest.fixture(scope="module")
def workers():
    with worker_process.serve() as one, worker_process.serve() as two:
        yield [one.address, two.address]


def _linear_model():
    @tf.function
    def predict(model_weights, x, training):
        matrix, bias = model_weights[0]
        return tf.matmul(x, matrix) + bias

    @tf.function
    def loss(output, y, sample_weight=None):
        return tf.reduce_mean(tf.square(output - y))

    return tff.learning.models.FunctionalModel(
        initial_weights=((np.zeros([_FEATURES, 30], np.float32), np.zeros([30], np.float32)), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=(tf.TensorSpec([None, _FEATURES]), tf.TensorSpec([None, 30])),
    )


def _process():
    aggregator = aggregators.build_dp_ftrl_aggregator(
        blt.Blt((0.99, 0.8), (0.05, 0.2)),
        noise_multiplier=0.5,
        clients_per_round=5,
        clip_norm=0.5,
        deterministic_seed=3,
    )
    return tff.learning.algorithms.build_unweighted_fed_avg(
        _linear_model(),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        server_optimizer_fn=tff.learning.optimizers.build_adam(0.01),
        model_aggregator=aggregator,
    )


def _clients(num_clients, seed):
    rng = np.random.default_rng(seed)
    examples = [
        (rng.normal(size=(6, _FEATURES)), rng.normal(size=(6, 30))) for _ in range(num_clients)
    ]
    return [
        tf.data.Dataset.from_tensor_slices((x.astype(np.float32), y.astype(np.float32))).batch(3)
        for x, y in examples
    ]


def _train(process):
    """The weights, and the metrics of all rounds."""
    state = process.initialize()
    metrics = []
    for t, num_clients in enumerate(_COHORTS):
        output = process.next(state, _clients(num_clients, t))
        state = output.state
        metrics.append(output.metrics)
    assert type(output).__name__ == "LearningProcessOutput"
    return process.get_model_weights(state).trainable, metrics


@pytest.fixture(scope="module")
def trained():
    process = _process()
    with execution.local():
        return process, _train(process)


def _assert_close(actual, expected):
    """Equal, but for the order in which the clients' updates were added."""
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected
    )


def test_two_workers_train_the_model_of_one_process(workers, trained):
    process, expected = trained
    with execution.remote_workers(workers):
        _assert_close(_train(process), expected)


def test_one_worker_trains_it_to_the_last_bit(workers, trained):
    process, expected = trained
    with execution.remote_workers(workers[:1]):
        tf.nest.map_structure(np.testing.assert_array_equal, _train(process), expected)


def test_without_the_faster_transfer_it_is_the_same(workers, trained, monkeypatch):
    process, expected = trained
    monkeypatch.setattr(state_transfer, "install_fast_state_transfer", lambda: False)
    state_transfer.uninstall_fast_state_transfer()
    with execution.remote_workers(workers[:1]):
        tf.nest.map_structure(np.testing.assert_array_equal, _train(process), expected)


@pytest.mark.slow
def test_secure_sums_are_computed_if_asked_for(workers):
    @tff.federated_computation(
        tff.FederatedType(np.int32, tff.SERVER), tff.FederatedType(np.int32, tff.CLIENTS)
    )
    def next_fn(state, data):
        return state, tff.backends.mapreduce.federated_secure_modular_sum(data, 8)

    with execution.remote_workers(workers, secure_sums=True):
        execution.check_secure_sums()
        assert next_fn(1, [3, 7, 6]) == (1, (3 + 7 + 6) % 8)
    with (
        execution.remote_workers(workers),
        pytest.warns(UserWarning, match="secure_sums=True. It runs on this machine alone"),
        pytest.raises(Exception, match="federated value"),  # TFF's way to say it has none.
    ):
        next_fn(1, [3, 7, 6])


class _Gate:
    """A process whose clients say that they have begun, and then wait.

    Its state is the sum of all clients' numbers so far.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._go = folder / "go"

    @property
    def process(self) -> tff.templates.IterativeProcess:
        folder, go = str(self._folder), str(self._go)

        @tff.tensorflow.computation(np.int32)
        def work(number):
            name = tf.strings.join([folder, tf.strings.as_string(number)], separator="/begun-")
            with tf.control_dependencies([tf.io.write_file(name, "")]):
                is_shut = tf.identity(True)
            (is_shut,) = tf.while_loop(
                lambda is_shut: is_shut,
                lambda is_shut: (tf.equal(tf.size(tf.io.matching_files(go)), 0),),
                (is_shut,),
            )
            with tf.control_dependencies([is_shut]):
                return tf.identity(number)

        @tff.tensorflow.computation(np.int32, np.int32)
        def add(total, update):
            return total + update

        @tff.federated_computation
        def initialize():
            return tff.federated_value(np.int32(0), tff.SERVER)

        @tff.federated_computation(
            tff.FederatedType(np.int32, tff.SERVER), tff.FederatedType(np.int32, tff.CLIENTS)
        )
        def next_fn(state, data):
            total = tff.federated_sum(tff.federated_map(work, data))
            return tff.federated_map(add, (state, total)), total

        return tff.templates.IterativeProcess(initialize, next_fn)

    def wait_for(self, *numbers: int) -> None:
        """Until these clients have begun; then it is as if they had not."""
        for number in numbers:
            begun = self._folder / f"begun-{number}"
            while not begun.exists():
                time.sleep(0.01)
            begun.unlink()

    def open(self) -> None:
        """Lets all clients end."""
        self._go.touch()


@contextlib.contextmanager
def _meanwhile(what):
    """Runs a function in a thread beside the block, which it must not outlast."""
    errors = []

    def run():
        try:
            what()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive() and not errors, errors


def _kill(worker):
    os.kill(worker.pid, signal.SIGKILL)


def test_a_round_outlives_one_of_two_workers(tmp_path):
    gate = _Gate(tmp_path)
    with (
        worker_process.serve() as killed,
        worker_process.serve() as other,
        execution.remote_workers([killed.address, other.address]),
    ):

        def kill():
            gate.wait_for(1, 2)  # Both shares are under way.
            _kill(killed)
            gate.open()

        process = gate.process
        state = process.initialize()
        with _meanwhile(kill), pytest.warns(UserWarning, match=f"{killed.address} was lost"):
            state, total = process.next(state, [1, 2])
        assert (state, total) == (3, 3)
        state, total = process.next(state, [4, 5, 6])  # With the other alone.
        assert (state, total) == (18, 15)


@pytest.mark.slow
def test_a_round_ends_with_its_last_worker(tmp_path):
    gate = _Gate(tmp_path)
    with (
        worker_process.serve() as one,
        worker_process.serve() as two,
        execution.remote_workers([one.address, two.address], patience_seconds=1.0),
    ):

        def kill():
            gate.wait_for(1, 2)
            _kill(one)
            _kill(two)

        process = gate.process
        state = process.initialize()
        with (
            _meanwhile(kill),
            pytest.warns(UserWarning, match="was lost"),
            pytest.raises(execution.NoWorkersError, match=f"{one.address}, {two.address}.*go on"),
        ):
            process.next(state, [1, 2])
        assert state == 0


def test_a_worker_that_comes_back_is_used_again(tmp_path):
    gate = _Gate(tmp_path)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        killed = first.enter_context(worker_process.serve())
        port = int(killed.address.rpartition(":")[2])

        def replace():
            gate.wait_for(1, 2)
            _kill(killed)
            first.close()
            second.enter_context(worker_process.serve(port))
            gate.wait_for(1, 2)  # Once more, by the new worker.
            gate.open()

        with execution.remote_workers([killed.address]):
            process = gate.process
            state = process.initialize()
            with _meanwhile(replace), pytest.warns(UserWarning, match="was lost"):
                state, total = process.next(state, [1, 2])
            assert (state, total) == (3, 3)
            assert process.next(state, [3])[0] == 6


@pytest.mark.slow
def test_a_worker_that_is_replaced_between_rounds_is_used_again(tmp_path):
    gate = _Gate(tmp_path)
    gate.open()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        killed = first.enter_context(worker_process.serve())
        with execution.remote_workers([killed.address]):
            process = gate.process
            state = process.next(process.initialize(), [1, 2])[0]
            _kill(killed)
            first.close()
            second.enter_context(worker_process.serve(int(killed.address.rpartition(":")[2])))
            with pytest.warns(UserWarning, match="was lost"):
                assert process.next(state, [3, 4])[0] == 10


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up(tmp_path):
    gate = _Gate(tmp_path)
    with (
        worker_process.serve() as stopped,
        worker_process.serve() as other,
        execution.remote_workers([stopped.address, other.address]),
    ):

        def stop():
            gate.wait_for(1, 2)
            os.kill(stopped.pid, signal.SIGSTOP)
            gate.open()

        process = gate.process
        with _meanwhile(stop), pytest.warns(UserWarning, match="stopped answering"):
            assert process.next(process.initialize(), [1, 2])[0] == 3
        _kill(stopped)


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_given_up(tmp_path):
    gate = _Gate(tmp_path)
    with (
        worker_process.serve() as worker,
        execution.remote_workers([worker.address], share_seconds=2.0),
    ):
        process = gate.process
        with (
            pytest.warns(UserWarning, match="DEADLINE_EXCEEDED"),
            pytest.raises(execution.NoWorkersError, match="fifth time"),
        ):
            process.next(process.initialize(), [1])


@pytest.mark.slow
def test_a_worker_that_is_silent_at_first_is_named(workers):
    with (
        pytest.warns(UserWarning, match="at 127.0.0.1:9 does not answer"),
        execution.remote_workers(["127.0.0.1:9", workers[0]]),
    ):
        pass
    with (
        pytest.raises(execution.NoWorkersError, match="No worker answers at 127.0.0.1:9:"),
        execution.remote_workers(["127.0.0.1:9"]),
    ):
        pass


def test_errors_of_a_computation_are_those_of_one_process(workers):
    @tff.tensorflow.computation(np.int32)
    def fail(number):
        with tf.control_dependencies([tf.debugging.assert_less(number, 5, "too large")]):
            return tf.identity(number)

    @tff.federated_computation(
        tff.FederatedType(np.int32, tff.SERVER), tff.FederatedType(np.int32, tff.CLIENTS)
    )
    def next_fn(state, data):
        return state, tff.federated_sum(tff.federated_map(fail, data))

    with execution.remote_workers(workers):
        assert next_fn(1, [2, 3]) == (1, 5)
        with pytest.raises(Exception, match="too large"):
            next_fn(1, [2, 7])


def test_what_is_no_round_runs_here(workers):
    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def total(data):
        return tff.federated_sum(data)

    with execution.remote_workers(workers):
        assert total([3, 4]) == 7


@pytest.mark.parametrize(
    "addresses, match",
    [
        ([], "at least one"),
        ("localhost:7000", "must be a list"),
        (["localhost"], "'localhost', which is not 'host:port'"),
        (["localhost:x"], "not 'host:port'"),
        (["localhost:70000"], "not 'host:port'"),
        ([":7000"], "not 'host:port'"),
        (["localhost:7000", "localhost:7000"], "twice"),
        (["localhost:7000", "192.0.2.1:7000"], "'192.0.2.1:7000', which is another machine's"),
        (["localhost.example.com:7000"], "trust_network=True"),
        (["0.0.0.0:7000"], "trust_network=True"),
    ],
)
def test_addresses_that_cannot_be_used(addresses, match):
    with pytest.raises(ValueError, match=match), execution.remote_workers(addresses):
        pass


@pytest.mark.slow
def test_other_machines_are_allowed_on_a_trusted_network():
    # Of a network for documentation: nobody is there.
    with (
        pytest.raises(execution.NoWorkersError),
        execution.remote_workers(["[2001:db8::1]:7000", "192.0.2.99:7000"], trust_network=True),
    ):
        pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
