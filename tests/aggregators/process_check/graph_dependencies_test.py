"""Tests that no dependence inside a TensorFlow graph is missed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators.process_check import graph_dependencies
from tff_dpftrl.private_round import seeds


def _analyse(function, num_results):
    computation = tff.tensorflow.computation(function, [np.float32, np.float32])
    return graph_dependencies.analyse(computation.to_building_block(), 2, num_results)


def test_results_depend_on_what_they_are_made_of():
    dependencies = _analyse(lambda a, b: (a + 1.0, (b, a * b), tf.constant(2.0)), 4)
    assert dependencies.arguments == ({0}, {1}, {0, 1}, set())
    assert dependencies.random == (False,) * 4


def test_control_dependencies_count():
    def assert_first(a, b):
        with tf.control_dependencies([tf.debugging.assert_positive(a)]):
            return tf.identity(b)

    assert _analyse(assert_first, 1).arguments == ({0, 1},)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: tf.cond(a > 0, lambda: b, lambda: b + 1.0),
        lambda a, b: tf.while_loop(lambda i: i < a, lambda i: [i + 1.0], [b])[0],
        lambda a, b: tf.function(lambda x, y: x * y)(a, b),
        lambda a, b: tf.data.Dataset.from_tensors(a).map(lambda x: x + b).reduce(0.0, tf.add),
    ],
    ids=["cond", "while", "function", "dataset"],
)
def test_functions_and_loops_count_as_one_step(function):
    assert _analyse(function, 1).arguments == ({0, 1},)


@pytest.mark.parametrize("source, is_known", [(seeds.SOURCE, True), ("/tmp/file", False)])
def test_only_the_bits_of_the_operating_system_are_read_without_a_channel(source, is_known):
    def keep_apart(a, b):
        bits = tf.cast(seeds.root_seed_from_os()[0], tf.float32)
        return a + bits, b

    with seeds.reading(source):
        dependencies = _analyse(keep_apart, 2)
    assert dependencies.arguments == (({0}, {1}) if is_known else ({0, 1}, {0, 1}))
    assert dependencies.random == (True, not is_known)


def test_a_variable_is_a_channel_between_all():
    def through_a_variable(a, b):
        variable = tf.Variable(0.0)
        with tf.control_dependencies([variable.assign(a)]):
            kept = tf.identity(b)
        return kept, variable.read_value()

    assert _analyse(through_a_variable, 2).arguments == ({0, 1}, {0, 1})


def test_python_functions_are_not_looked_into():
    dependencies = _analyse(lambda a, b: (tf.numpy_function(np.sin, [a], tf.float32), b), 2)
    assert dependencies.arguments == ({0, 1}, {0, 1})


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tf.random.normal([]),
        lambda: tf.random.stateless_normal([], seed=[1, 2]),
        lambda: tf.function(lambda: tf.random.normal([]))(),
    ],
    ids=["stateful", "stateless", "in a function"],
)
def test_random_numbers_are_seen_where_they_go(draw):
    dependencies = _analyse(lambda a, b: (a + draw(), b * 2.0), 2)
    assert dependencies.arguments == ({0}, {1})
    assert dependencies.random == (True, False)


def test_sequences_are_arguments_too():
    sequence = tff.SequenceType(np.float32)
    computation = tff.tensorflow.computation(
        lambda data, b: (data.reduce(0.0, tf.add), b), [sequence, np.float32]
    )
    dependencies = graph_dependencies.analyse(computation.to_building_block(), 2, 2)
    assert dependencies.arguments[0] >= {0}
    assert dependencies.arguments[1] >= {1}
