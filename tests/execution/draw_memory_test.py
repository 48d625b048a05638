"""A memory of draws changes the time that noise takes, and no bit of it."""

from __future__ import annotations

import gc
import itertools
import os
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.execution import draw_memory, graph_function
from tff_dpftrl.mechanisms import identity, noise_recipe, restarts, tree
from tff_dpftrl.numpy_noise import kernels
from tff_dpftrl.private_round import gaussians, noise_stream

_ROUNDS = 37  # Beyond 2⁵: the tree has six levels, and a second root begins with round 32.
_TREE = tree.Tree(_ROUNDS)
_ALL = 10
_SPECS = [tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.int64)]


def _noise(strategy, memory=None, shapes=((7,), (7,))):
    """Function from a round and a seed to the bytes of the noise, from a graph with `memory`."""
    stream = noise_stream.NoiseStream(strategy.noise_recipe(), shapes)
    graph = graph_function.GraphFunction.trace(lambda t, seed: stream.next((), t, seed)[0], _SPECS)
    call = tf.function(
        graph.importer(edit=memory.attach if memory else None), input_signature=_SPECS
    )

    def noise(t, seed=(5, -6), _memory=memory):  # The memory has to last as long as its graph.
        return [x.numpy().tobytes() for x in call(t, tf.constant(seed, tf.int64))]

    return noise


@pytest.fixture(scope="module", name="expected")
def _expected():
    noise = _noise(_TREE)
    return [noise(t) for t in range(_ROUNDS)]


@pytest.mark.slow
@pytest.mark.parametrize("copies, kept", [(0, 0), (1, 1), (4, 4), (99, _ALL), (None, _ALL)])
def test_the_noise_has_the_same_bits(copies, kept, expected):
    memory = draw_memory.DrawMemory(copies)
    noise = _noise(_TREE, memory)
    assert memory.num_copies == kept
    assert [noise(t) for t in range(_ROUNDS)] == expected


@pytest.mark.slow
def test_it_does_not_matter_what_was_run_before(expected):
    """Any round after any other, and rounds of another seed between: as resumed runs have it."""
    noise = _noise(_TREE, draw_memory.DrawMemory(6))
    others = _noise(_TREE)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(_ROUNDS), 3))
    for t in order.tolist():
        assert noise(t) == expected[t]
        if t % 5 == 0:
            assert noise(t, (5, 6)) == others(t, (5, 6))


@pytest.mark.parametrize("first", [pytest.param(15, marks=pytest.mark.slow), 33])
def test_a_resumed_run_may_have_another_memory(first, expected):
    before = _noise(_TREE, draw_memory.DrawMemory(3))
    after = _noise(_TREE, draw_memory.DrawMemory())
    noise = [(before if t < first else after)(t) for t in range(_ROUNDS)]
    assert noise == expected


def test_blocks_of_a_restarted_tree_do_not_share_draws():
    strategy = restarts.Restarted(tree.Tree(5), (0, 3, 8))
    with_memory, without = _noise(strategy, draw_memory.DrawMemory()), _noise(strategy)
    found = [with_memory(t) for t in range(13)]
    assert found == [without(t) for t in range(13)]
    assert len(set(map(tuple, found))) == 13


@pytest.mark.parametrize("copies", [0, pytest.param(5, marks=pytest.mark.slow), _ALL])
def test_draws_that_are_kept_are_not_made_again(copies, monkeypatch):
    calls = []
    size = 100 + copies  # A function of its own, with the counter in it.
    normal = gaussians.normal

    def count(values):
        calls.append(1)
        return values

    def counted(seed, size):
        drawn = tf.numpy_function(count, [normal(seed, size)], tf.float32)
        return tf.ensure_shape(drawn, [size])

    monkeypatch.setattr(gaussians, "normal", counted)
    noise = _noise(_TREE, draw_memory.DrawMemory(copies), [(size,)])
    monkeypatch.undo()
    for t in range(_ROUNDS):
        noise(t)

    # An independent list of what rounds need.
    terms = kernels.build(_TREE.noise_recipe())._terms
    needed = [[index for index, _ in terms(t)] for t in range(_ROUNDS)]
    every, distinct = sum(map(len, needed)), len(set(itertools.chain(*needed)))
    assert len(calls) == every if copies == 0 else distinct <= len(calls) < every
    if copies == _ALL:
        assert len(calls) == distinct < 2.5 * _ROUNDS


def test_the_slots_that_save_most_come_first():
    """Counts the draws of each slot: those of later slots change more often."""
    kernel = noise_stream.build_kernel(_TREE.noise_recipe())
    terms = kernels.build(_TREE.noise_recipe())._terms
    num_used, seen = np.zeros(_ALL, int), [set() for _ in range(_ALL)]
    for t in range(32):
        for index, _ in terms(t):
            slot = int(kernel.slot(tf.constant(index, tf.int64)))
            assert 0 <= slot <= _ALL
            assert slot < _ALL or index // noise_recipe.LEVEL_STRIDE == 1
            if slot < _ALL:
                num_used[slot] += 1
                seen[slot].add(index)
    saved = num_used - [len(indices) for indices in seen]
    top = [31, 31, 30, 28, 24, 16]  # The root, then the first draws of the levels 5 to 1.
    np.testing.assert_array_equal(saved, top + [15, 14, 12, 8])


def _in_a_function(free):
    graph = tf.function(free, autograph=False).get_concrete_function().graph
    return graph.get_operations()


def _in_a_graph(free):
    with tf.Graph().as_default() as graph:
        free()
    return graph.get_operations()


@pytest.mark.parametrize("while_building", [None, _in_a_function, _in_a_graph])
def test_the_memory_is_freed_with_its_object(monkeypatch, while_building):
    """Also if the garbage collector comes while a graph is built, which stays as it is."""
    monkeypatch.setattr(draw_memory, "_COUNTER", itertools.count(10**9))
    memory = draw_memory.DrawMemory()
    kept = [memory, _noise(tree.Tree(3), memory, [(5,)])]
    kept[1](0)
    del memory

    def exists():
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=None, shared_name=f"repeated_draws_{os.getpid()}_{10**9}"
        )
        return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))

    def free():
        kept.clear()
        gc.collect()

    assert exists()
    operations = while_building(free) if while_building else free()
    assert not exists()
    assert not [op for op in operations or () if op.type == "DestroyResourceOp"]


def test_the_default_fits_the_size_of_the_model():
    memory = draw_memory.DrawMemory()
    weights = draw_memory._DEFAULT_BYTES // 4 // 3
    _noise(tree.Tree(9), memory, [(weights - 8,), (8,)])
    assert memory.num_copies == 3


def test_other_noise_keeps_nothing():
    memory = draw_memory.DrawMemory()
    assert _noise(identity.Identity(), memory)(3) == _noise(identity.Identity())(3)
    assert memory.num_copies == 0


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="memory_copies must be .*at least 0"):
        draw_memory.DrawMemory(-1)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
