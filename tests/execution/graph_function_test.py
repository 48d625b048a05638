"""What a graph keeps between operations belongs to one call: variables, tables, randomness."""

import resource

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.execution import small_processes
from tff_dpftrl.execution import allocator, client_part, compiled_process, graph_function

_MIB = 2**20


def _run(process, clients, num_rounds=2, num_threads=2):
    """Outputs of some rounds from the same state."""
    runner = client_part.ThreadedClients(num_threads)
    compiled = compiled_process.compile_process(process, clients=runner)
    outputs = [compiled.next(0.0, clients)[1] for _ in range(num_rounds)]
    compiled.close()
    return outputs


def _count_up(x):
    variable = tf.Variable(tf.cast(x, tf.float32))
    result = variable.read_value()
    for _ in range(20):
        with tf.control_dependencies([result]):
            added = variable.assign_add(1.0)
        with tf.control_dependencies([added]):
            result = variable.read_value()
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_large_constants_are_taken_out(dtype):
    large = np.arange(70_000).reshape(7, -1).astype(dtype)
    with tf.Graph().as_default() as graph:
        tf.constant(large, name="large")
        tf.constant(large[0, :9], name="small")
        tf.constant([b"x" * 40_000] * 2, name="texts")
    nodes = {node.name: node for node in graph.as_graph_def().node}
    taken = {name: graph_function.take_constant(node) for name, node in nodes.items()}
    assert taken["small"] is None and nodes["small"].op == "Const"
    np.testing.assert_array_equal(taken["large"], large)
    assert taken["texts"].numpy().tolist() == [b"x" * 40_000] * 2
    placeholder = nodes["large"]
    assert placeholder.op == "Placeholder" and "value" not in placeholder.attr
    assert tf.TensorShape(placeholder.attr["shape"].shape) == large.shape
    assert graph_function.take_constant(placeholder) is None


def test_each_call_has_variables_of_its_own():
    outputs = _run(small_processes.build(_count_up), list(range(50)), num_threads=5)
    np.testing.assert_array_equal(outputs, 2 * [sum(range(50)) + 50 * 20])


def _large_variable(x):
    variable = tf.Variable(tf.zeros([_MIB // 4]))
    with tf.control_dependencies([variable.assign_add(tf.ones([_MIB // 4]))]):
        value = variable.read_value()[0]
    # After a failure nothing that follows is run.
    checked = tf.debugging.check_numerics(value / tf.cast(x, tf.float32), "division by zero")
    with tf.control_dependencies([variable.assign_add(tf.fill([_MIB // 4], checked))]):
        return variable.read_value()[0]


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_variables_are_freed_also_when_a_client_fails(fails):
    allocator.give_back_memory()  # Its pools kept half of what was freed.
    compiled = compiled_process.compile_process(small_processes.build(_large_variable))

    def round_of_100():
        if not fails:
            compiled.next(0.0, 100 * [1])
            return
        for _ in range(100):
            with pytest.raises(tf.errors.InvalidArgumentError, match="division by zero"):
                compiled.next(0.0, [0])

    round_of_100()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        round_of_100()
    # 500 calls with a variable of 1 MiB each; ru_maxrss is in KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    assert compiled.next(0.0, [1])[1] == 2.0


def _built_like_a_keras_model(x):
    """Looks up a variable at an input that nobody feeds, and again at one that is fed."""
    variable = tf.Variable(tf.range(10, dtype=tf.float32))
    tf.gather(variable, tf.compat.v1.placeholder(tf.int32, [None]))
    return tf.gather(variable, x)


def _last_of_many_additions(x):
    """Only the last addition is what the result waits for."""
    variable = tf.Variable(tf.cast(x, tf.float32))
    for _ in range(20):
        with tf.control_dependencies([variable.assign_add(1.0)]):
            result = variable.read_value()
    return result


@pytest.mark.parametrize(
    "client_fn, expected", [(_built_like_a_keras_model, 5.0), (_last_of_many_additions, 7.0)]
)
def test_what_no_output_needs_does_not_run_as_in_tff_s_executor(client_fn, expected):
    process = small_processes.build(client_fn)
    np.testing.assert_array_equal(_run(process, [2, 3]), [expected, expected])
    assert process.next(0.0, [2, 3])[1] == expected


def test_what_is_left_is_placed_beside_nothing_that_is_gone():
    with tf.Graph().as_default() as graph:
        gone = tf.compat.v1.placeholder(tf.float32, [], name="gone")
        with tf.compat.v1.colocate_with(gone):
            tf.constant(2.0, name="left")
    graph_def = graph.as_graph_def()
    graph_function.prune(graph_def, ["left:0"])
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    assert [operation.name for operation in graph.get_operations()] == ["left"]


def _look_up(values):
    """A client's work with a table; names of tensors are the same for all values."""

    def client(x):
        initializer = tf.lookup.KeyValueTensorInitializer(
            tf.range(len(values)), tf.constant(values, tf.float32)
        )
        return tf.ensure_shape(tf.lookup.StaticHashTable(initializer, -1.0).lookup(x), [])

    return client


def test_static_tables_of_two_processes_are_two_tables():
    for values in ([10.0, 20.0], [30.0, 50.0], [1.0, 2.0, 3.0]):
        outputs = _run(small_processes.build(_look_up(values)), [0, 1, 1])
        assert outputs == 2 * [values[0] + 2 * values[1]]


def test_static_tables_inside_one_process_are_two_tables():
    one, other = (tff.tensorflow.computation(_look_up(v), np.int32) for v in ([1.0], [2.0]))

    def round_fn(state, values):
        sums = [tff.federated_sum(tff.federated_map(fn, values)) for fn in (one, other)]
        return state, tff.federated_zip(tuple(sums))

    assert _run(small_processes.build_from(round_fn), [0, 0]) == 2 * [(2.0, 4.0)]


def test_a_table_can_be_used_by_a_dataset():
    def client(x):
        initializer = tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.constant([5, 6, 7]))
        table = tf.lookup.StaticHashTable(initializer, -1)
        keys = tf.data.Dataset.from_tensors(x).repeat(2)
        return keys.map(table.lookup).reduce(0, lambda total, value: total + value)

    assert _run(small_processes.build(client), [0, 2]) == 2 * [24]


def _mutable_table(x):
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, 0)
    with tf.control_dependencies([table.insert(x, x)]):
        return tf.ensure_shape(table.lookup(x), [])


def _queue(x):
    queue = tf.queue.FIFOQueue(10, tf.int32, [()])
    with tf.control_dependencies([queue.enqueue(x)]):
        return queue.size()


@pytest.mark.parametrize(
    ("client", "kind"), [(_mutable_table, "MutableHashTableV2"), (_queue, "FIFOQueueV2")]
)
def test_other_state_is_refused_by_name(client, kind):
    with pytest.raises(compiled_process.NotCompilableError, match=f"keeps state in a {kind}"):
        compiled_process.compile_process(small_processes.build(client))


def test_a_function_that_captures_is_refused():
    outside = tf.Variable(1.0)
    with pytest.raises(graph_function.UnsupportedGraphError, match="from outside"):
        graph_function.GraphFunction.trace(lambda x: [x + outside], [tf.TensorSpec([], tf.float32)])


def _own_place(x, value):
    return tf.one_hot(x, 4) * value


_RANDOM = {
    "stateful": lambda: tf.random.normal([]),
    "in a function": tf.function(lambda: tf.random.normal([])),
    "in a loop": lambda: tf.while_loop(
        lambda i, _: i < 3, lambda i, _: (i + 1, tf.random.normal([])), [0, 0.0]
    )[1],
    "initializer": lambda: tf.random_normal_initializer()([]),
    "generator": lambda: tf.random.Generator.from_non_deterministic_state().normal([]),
    "dataset": lambda: tf.cast(
        tf.data.Dataset.random().take(1).reduce(np.int64(0), lambda _, x: x), tf.float32
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("in a function", "dataset") else pytest.mark.slow)
        for kind in _RANDOM
    ],
)
def test_random_numbers_are_new_in_every_call(kind):
    """As in TFF: across clients, rounds, and processes compiled from the same one."""
    server = tff.tensorflow.computation(
        lambda total: (total, _RANDOM[kind]()), tff.TensorType(np.float32, [4])
    )
    process = small_processes.build(
        lambda x: _own_place(x, _RANDOM[kind]()),
        aggregate=lambda values: tff.federated_map(server, tff.federated_sum(values)),
    )
    drawn = []
    for _ in range(2):
        for clients, at_server in _run(process, [0, 1, 2, 3]):
            drawn += [*clients, at_server]
    assert len(set(drawn)) == 2 * 2 * 5
