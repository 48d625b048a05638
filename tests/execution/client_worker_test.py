"""A worker adds up a chunk as it is added up in one process, and needs no TFF for it."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.execution import plain_part
from tff_dpftrl.execution import client_part, client_worker, federated_round


def _sent(value):
    return pickle.loads(pickle.dumps(value))


def test_values_arrive_as_they_were():
    tensors = [
        tf.constant([[1.5, -0.0], [np.nan, np.inf]]),
        tf.constant(2**40, tf.int64),
        tf.constant([b"a", b"\xff\x00"]),
        tf.zeros([0, 3], tf.bool),
        tf.constant([1.0, 2.5], tf.bfloat16),
    ]
    arrived = client_worker.decode(_sent(client_worker.encode(tensors, "value")))
    for before, after in zip(tensors, arrived, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        np.testing.assert_array_equal(before.numpy(), after.numpy())


def test_datasets_arrive_with_their_elements_and_options():
    dataset = tf.data.Dataset.range(20).shuffle(20, seed=3, reshuffle_each_iteration=False).batch(3)
    (sent,) = client_worker.encode([federated_round.as_variant(dataset)], "client 0")
    (arrived,) = client_worker.decode(_sent([sent]))
    restored = tf.data.experimental.from_variant(arrived, dataset.element_spec)
    for expected, element in zip(dataset, restored, strict=True):
        np.testing.assert_array_equal(expected, element)
    (again,) = client_worker.encode([arrived], "client 0")
    options = [
        [
            node.attr["serialized_options"].s
            for node in tf.compat.v1.GraphDef.FromString(one.graph).node
            if node.op == "OptionsDataset"
        ]
        for one in (sent, again)
    ]
    assert options[0] == options[1] and options[0][0]


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([])),
        tf.data.Dataset.range(3).map(lambda _: tf.random.uniform([])),
    ],
    ids=["generator", "random"],
)
def test_datasets_that_would_be_others_elsewhere_are_refused(dataset):
    with pytest.raises(ValueError, match="client 7 cannot be sent.*stateful.*dataset_fn"):
        client_worker.encode([federated_round.as_variant(dataset)], "client 7")


def test_a_chunk_is_added_up_as_in_one_process():
    part = plain_part.build()
    functions = client_part.ClientFunctions(part)
    values, broadcast = plain_part.values(2), plain_part.broadcast()
    threads = client_part.ThreadedClients(1)
    expected = threads.sum(functions, [lambda v=v: v for v in values], broadcast)
    threads.close()
    worker = client_worker.ClientWorker()
    fetched = []

    def part_from_elsewhere():
        fetched.append(1)
        return _sent(part)

    for _ in range(2):
        total = worker.sum(
            "key",
            part_from_elsewhere,
            _sent(client_worker.encode(broadcast, "broadcast")),
            [_sent(client_worker.encode(value, "client")) for value in values],
        )
        for one, other in zip(expected, total, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)
    assert len(fetched) == 1


def test_a_failing_client_is_an_answer():
    worker = client_worker.ClientWorker()
    broadcast = client_worker.encode(plain_part.broadcast(), "broadcast")
    bad = client_worker.encode([tf.constant([-1.0, 0.0, 0.0])], "client")
    failure = _sent(worker.sum("key", plain_part.build, broadcast, [bad]))
    error = failure.error()
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert plain_part.NEGATIVE in error.message


def test_a_worker_starts_without_tff():
    code = (
        "import sys; sys.modules['tensorflow_federated'] = None; "
        "from tff_dpftrl.execution import client_worker, client_part, graph_function; "
        "print('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
