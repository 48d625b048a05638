"""Clients' results are added up in one order, and nothing goes on after a round that failed."""

import itertools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.execution import plain_part, small_processes
from tff_dpftrl.execution import client_part, compiled_process


@pytest.mark.parametrize("num_clients", [0, 1, 4, 5, 255, 256, 257, 1000])
def test_chunks_are_consecutive_and_few(num_clients):
    chunks = client_part.chunks(num_clients)
    assert list(itertools.chain(*chunks)) == list(range(num_clients))
    assert len(chunks) <= 64
    assert all(len(chunk) == len(chunks[0]) >= 2 for chunk in chunks[:-1])


def test_work_is_on_a_gpu_and_sums_are_not(monkeypatch):
    part = plain_part.build()
    values, broadcast = plain_part.values(5), plain_part.broadcast()
    results, totals = [], []
    for gpus in ([], ["a GPU"]):
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda _, gpus=gpus: gpus)
        functions = client_part.ClientFunctions(part)
        library = functions._add_clients.graph.as_graph_def().library
        nodes = [node for function in library.function for node in function.node_def]
        results.append(
            {
                op: {"GPU" in node.device for node in nodes if node.op == op}
                for op in ("Mul", "TensorListGetItem")
            }
        )
        # Without a GPU TensorFlow puts the work where there is a kernel.
        totals.append(functions.add(functions.zero(), values, broadcast)[0].numpy())
    without, with_gpu = results
    assert without == {"Mul": {False}, "TensorListGetItem": {False}}
    assert with_gpu == {"Mul": {True}, "TensorListGetItem": {False}}
    np.testing.assert_array_equal(*totals)


class _AddingUp:
    """In place of compiled functions: what was computed, and who did it when."""

    def __init__(self, on_work=lambda value: None, on_merge=lambda: None, is_large=False):
        self.is_large = is_large
        self._on_work, self._on_merge = on_work, on_merge
        self.running = self.most_ahead = self.most_a_call = 0
        self.done = []
        self._lock = threading.Lock()
        self._num_ahead = 0

    def zero(self):
        return []

    def add(self, total, clients, broadcast):
        with self._lock:
            if total is None:
                self._num_ahead += 1
                self.most_ahead = max(self.most_ahead, self._num_ahead)
            self.running += 1
            self.most_a_call = max(self.most_a_call, len(clients))
        try:
            for (value,) in clients:
                self._on_work(value)
                self.done.append(value)
        finally:
            with self._lock:
                self.running -= 1
        return (total or []) + [value + broadcast for (value,) in clients]

    def merge(self, total, other):
        with self._lock:
            self._num_ahead -= 1
        self._on_merge()
        return [*total, tuple(other)]


def _values(num_clients):
    return [lambda i=i: [i] for i in range(num_clients)]


@pytest.fixture
def clients():
    runner = client_part.ThreadedClients(3)
    yield runner
    runner.close()


def test_order_of_the_sum_is_that_of_the_clients(clients):
    def first_ones_last(value):
        time.sleep(0.002 * (9 - value))

    total = clients.sum(_AddingUp(first_ones_last), _values(7), 100)
    assert total == [100, 101, (102, 103), (104, 105), (106,)]


def test_order_within_a_chunk_is_that_of_the_clients(clients):
    """1,280 clients: 64 chunks of 20, in calls of 16 and 4."""
    functions = _AddingUp()
    first, *others = clients.sum(functions, _values(1280), 0)[19:]
    assert first == 19 and len(others) == 63
    assert all(list(other) == list(range(other[0], other[0] + 20)) for other in others)
    assert functions.most_a_call == 16


def test_no_more_than_two_sums_for_each_thread_wait(clients):
    functions = _AddingUp(on_merge=lambda: time.sleep(0.002))
    clients.sum(functions, _values(80), 0)
    assert functions.most_ahead <= 6 + 1  # And the total.


def test_no_more_large_sums_wait_than_threads_make(clients):
    functions = _AddingUp(on_merge=lambda: time.sleep(0.002), is_large=True)
    clients.sum(functions, _values(80), 0)
    assert functions.most_ahead <= 3 + 1


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("num_clients", [40, 20 * 64])
def test_interruption_while_merging_ends_all_work(clients, num_clients):
    functions = _AddingUp(lambda value: time.sleep(0.01), _interrupt)
    with pytest.raises(KeyboardInterrupt):
        clients.sum(functions, _values(num_clients), 0)
    assert functions.running == 0
    num_done = len(functions.done)
    # Three threads: a chunk that is merged, one that follows, and one call each at the end.
    assert num_done <= 3 * (2 * len(client_part.chunks(num_clients)[0]) + 16)
    assert clients.sum(_AddingUp(), _values(2), 0) == [0, 1]
    assert len(functions.done) == num_done


def test_interruption_while_waiting_ends_all_work(clients):
    """A client's `KeyboardInterrupt` comes out where the round waits for that client."""
    functions = _AddingUp(lambda value: _interrupt() if value == 0 else time.sleep(0.05))
    with pytest.raises(KeyboardInterrupt):
        clients.sum(functions, _values(40), 0)
    assert functions.running == 0 and len(functions.done) < 40


def _checked_log(x):
    return tf.debugging.check_numerics(tf.math.log(x), "not a logarithm")


def test_a_round_that_failed_can_be_repeated():
    compiled = compiled_process.compile_process(small_processes.build(_checked_log, np.float32))
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a logarithm"):
            compiled.next(0.0, [1.0, 1.0, -1.0] + 50 * [1.0])
        assert compiled.next(0.0, [1.0, 1.0])[1] == 0.0
    compiled.close()


def test_two_rounds_at_the_same_time_do_not_mix():
    compiled = compiled_process.compile_process(small_processes.build(lambda x: 2 * x))
    sums = {}

    def run(start):
        sums[start] = [compiled.next(0.0, range_of(start))[1] for _ in range(20)]

    def range_of(start):
        return list(range(start, start + 30))

    threads = [threading.Thread(target=run, args=[start]) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {start: 20 * [2 * sum(range_of(start))] for start in (0, 100, 200)}
    compiled.close()


def _devices(function_def, op_types):
    """Where operations of these types may run."""
    return {node.device for node in function_def.node_def if node.op in op_types}


def test_sums_are_pinned_to_the_cpu_and_clients_are_not():
    process = small_processes.build(lambda x: tf.cast(x, tf.float32) / 3.0)
    compiled = compiled_process.compile_process(process)
    functions = compiled._clients
    for summing in (functions._zero, functions._add_clients, functions._add_sum):
        graph = summing.graph.as_graph_def()
        devices = {n.device for n in graph.node if n.op not in ("Placeholder", "NoOp", "Identity")}
        assert devices == {"/device:CPU:0"}
    bodies = functions._add_clients.graph.as_graph_def().library.function
    (body,) = [f for f in bodies if _devices(f, ["RealDiv"])]
    assert _devices(body, ["RealDiv"]) == {""}
    assert _devices(body, ["AddV2", "TensorListGetItem"]) == {"/device:CPU:0"}
    compiled.close()
