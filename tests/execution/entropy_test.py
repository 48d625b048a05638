"""Bits that audits hold fixed: the same until they are renewed, and nowhere else."""

import inspect
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.execution import compiled_process, entropy, graph_function
from tff_dpftrl.private_round import seeds


@pytest.fixture(name="graph")
def _graph():
    """Two reads, one of them in a function."""
    inner = tf.function(seeds.root_seed_from_os)
    return graph_function.GraphFunction.trace(lambda: [seeds.root_seed_from_os(), inner(4)], [])


def test_bits_are_fresh_in_every_execution(graph):
    call = tf.function(graph.importer())
    drawn = [np.concatenate(call()) for _ in range(3)]
    assert len({word for seed in drawn for word in seed.tolist()}) == 18


def test_repeated_bits_are_the_same_until_they_are_renewed(graph):
    repeated = entropy.Repeated()
    call = tf.function(graph.importer(edit=repeated.read_instead))
    one, again = call(), call()
    tf.nest.map_structure(np.testing.assert_array_equal, one, again)
    repeated.renew()
    assert not np.any(np.concatenate(one) == np.concatenate(call()))
    path = pathlib.Path(repeated.path)
    assert path.exists()
    del repeated, call
    assert not path.exists()


def test_only_reads_of_the_system_are_of_the_system(graph):
    definition = tf.compat.v1.GraphDef.FromString(graph.graph)
    assert entropy.is_of_the_system(definition)
    assert not entropy.OPS.isdisjoint(node.op for node in graph_function.nodes_of(definition))
    entropy.Repeated().read_instead(definition)
    assert not entropy.is_of_the_system(definition)


def test_no_public_function_takes_bits():
    taken = inspect.signature(compiled_process.compile_process).parameters
    assert list(taken) == ["process", "dataset_fn", "tensor_spec", "clients"]
