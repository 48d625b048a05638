"""Secure noise in graphs: compiled rounds and servers of tasks draw it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.plans import small_tasks
from tff_dpftrl.execution import compiled_process, entropy, graph_function
from tff_dpftrl.mechanisms import blt, tree
from tff_dpftrl.private_round import noise_stream, secure_calls, seeds
from tff_dpftrl.runtime.plans import building, server_work

_STRATEGIES = {"blt": blt.Blt((0.9, 0.5), (0.3, 0.2)), "tree": tree.Tree(8)}
_SPECS = [tf.TensorSpec([], tf.int64), tf.TensorSpec([4], tf.int64)]


@functools.cache
def _aggregation(name):
    return small_tasks.fixed(0.5, _STRATEGIES[name], secure_noise=True)


@functools.cache
def _round(name):
    return small_tasks.federated_averaging(_aggregation(name))


@pytest.mark.parametrize("name", ["blt", pytest.param("tree", marks=pytest.mark.slow)])
def test_a_compiled_round_has_the_noise_of_its_round(name):
    aggregation = _aggregation(name)
    compiled = compiled_process.CompiledProcess(_round(name))
    private_round, shapes = aggregation.private_round, [[3, 1], [1]]
    noise_state = private_round.initial_state(shapes)
    no_clients = private_round.no_contribution(shapes)
    state = compiled.initialize()
    for _ in range(3):
        noise_state, noise, _ = private_round.release(noise_state, no_clients)
        before = compiled.get_model_weights(state).trainable
        again = compiled.next(state, []).state
        state = compiled.next(state, []).state
        for weights in (compiled.get_model_weights(one).trainable for one in (state, again)):
            for new, old, added in zip(weights, before, noise, strict=True):
                np.testing.assert_array_equal(new, old - tf.cast(added, tf.float32))
    compiled.close()


def test_a_graph_whose_draws_nobody_answers_fails_and_shows_no_seed():
    stream = noise_stream.NoiseStream(_STRATEGIES["blt"].noise_recipe(), [[7]], secure=True)
    with secure_calls.graphs_for_others():
        graph = graph_function.GraphFunction.trace(
            lambda t, seed: stream.next(stream.initial_buffer(), t, seed)[0], _SPECS
        )
    call = tf.function(graph.importer(), input_signature=_SPECS)
    seed = seeds.root_seed(1234567890123, secure=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="own executor cannot") as caught:
        call(tf.constant(0, tf.int64), seed)
    assert "1234567890123" not in str(caught.value)


@pytest.fixture(scope="module", name="task_plans")
def _task_plans():
    return small_tasks.plans(_round("blt"), private_round=_aggregation("blt").private_round)


def test_a_server_of_tasks_draws_and_passes_over_secure_noise(task_plans):
    server = server_work.ServerWork(task_plans.server, entropy.Repeated())
    state = server.initialize()
    labels = [tensor.label for tensor in server.state]
    assert state[labels.index("aggregator/seed")].shape == (4,)
    assert state[labels.index("aggregator/buffer")].dtype == np.float64
    (first, metrics), (again, _) = (server.finish(state, server.zero()) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert metrics["aggregator/noise_stddev"] == 0.5
    assert np.all(server.weights(first)["trainable/0"] != 0)
    skipped = server.skip(state)
    for label, one, other in zip(labels, skipped, first, strict=True):
        if label.startswith("aggregator/"):
            np.testing.assert_array_equal(one, other, label)
    # Another process loads the same bytes: nothing in them is of this one.
    for graph in (task_plans.server.finish, task_plans.server.skip):
        assert b"PyFunc" not in graph.graph_def


def test_a_plan_with_a_call_to_this_process_is_refused():
    private_round = _aggregation("blt").private_round

    def skip(*state):
        return list(tf.nest.flatten(private_round.skip(private_round.state_type(*state), [[4]])))

    specs = [tf.TensorSpec([], tf.int64), tf.TensorSpec([4], tf.int64)]
    specs.append(tf.TensorSpec([2, 4], tf.float64))
    labels = ["a", "b", "c"]
    graph = building.graphs.traced(skip, specs, inputs=labels, outputs=labels)
    with pytest.raises(building.CannotPlanError, match="PyFunc"):
        building._check_noise("skip", graph)
