"""Noise of every strategy of `mechanisms`: streamed, it is what the strategy promises."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.private_round import unit_draws
from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    noise_recipe,
    restarts,
    tree,
)
from tff_dpftrl.private_round import noise_stream

# Published production BLT (Google, min-sep 400, n = 2000).
_PRODUCTION = blt.Blt(
    (0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778),
    (0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748073734),
)
_RNG = np.random.default_rng(5)
_ROWS = np.hstack([np.ones((40, 1)), _RNG.uniform(0, 0.4, (40, 3))])
_GENERAL = banded.Banded(np.where(np.arange(4) <= np.arange(40)[:, np.newaxis], _ROWS, 0.0))

_DENSE = np.tril(_RNG.normal(size=(23, 23)) / 3) + 2 * np.eye(23)


@pytest.mark.parametrize(
    "strategy, num_rounds",
    [
        pytest.param(identity.Identity(), 200, id="identity"),
        pytest.param(_PRODUCTION, 2000, id="blt"),
        pytest.param(banded_toeplitz.BandedToeplitz.fhu(20), 200, id="banded-toeplitz"),
        pytest.param(_GENERAL, 40, id="banded"),
        pytest.param(inverse_banded.InverseBanded.bisr(5), 200, id="bisr"),
        pytest.param(inverse_banded.InverseBanded.lambda_cgd(0.7), 200, id="lambda-cgd"),
        pytest.param(dense.Dense(_DENSE, rounds_at_once=6), 23, id="dense-in-blocks"),
    ],
)
def test_streamed_noise_is_the_noise_matrix(strategy, num_rounds):
    streamed = unit_draws.run_on_basis(strategy.noise_recipe(), num_rounds)
    np.testing.assert_allclose(streamed, strategy.noise_matrix(num_rounds), atol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [
        identity.Identity(),
        _PRODUCTION,
        tree.Tree(11),
        tree.Tree(11, variance_reduction=False),
        banded_toeplitz.BandedToeplitz.fhu(4),
        _GENERAL,
        inverse_banded.InverseBanded.bisr(3),
        dense.Dense(_DENSE, rounds_at_once=4),
        restarts.Restarted(_PRODUCTION, (0, 5)),
    ],
    ids=lambda strategy: strategy.name,
)
def test_memory_is_what_the_stream_keeps(strategy):
    stream = noise_stream.NoiseStream(strategy.noise_recipe(), [(7,)])
    kept = stream.initial_buffer()
    assert strategy.memory_copies(11) == (0 if kept == () else kept.shape[0])


@pytest.mark.parametrize(
    "strategy",
    [
        identity.Identity(),
        _PRODUCTION,
        tree.Tree(11),
        pytest.param(tree.Tree(11, variance_reduction=False), marks=pytest.mark.slow),
        banded_toeplitz.BandedToeplitz.fhu(4),
        _GENERAL,
        inverse_banded.InverseBanded.bisr(3),
    ],
    ids=["identity", "blt", "tree", "vanilla-tree", "banded-toeplitz", "banded", "bisr"],
)
def test_covariance_of_emitted_noise(strategy):
    """Sample covariance over rounds, within and across tensors, with six-sigma margins."""
    num_rounds, size = 11, 30_000
    noise = _emitted(strategy.noise_recipe(), num_rounds, size)
    rows = noise.reshape(2 * num_rounds, size)
    covariance = rows @ rows.T / size

    matrix = strategy.noise_matrix(num_rounds)
    block = matrix @ matrix.T
    expected = np.kron(np.eye(2), block)
    margin = _margin(expected, size)
    assert np.all(np.abs(covariance - expected) < margin)
    # Power: a variance off by 8 % is noticed, and so are rounds that are independent.
    assert np.all(0.08 * np.diag(expected) > np.diag(margin))
    if strategy.mechanism != "identity":
        independent = np.diag(np.diag(block))
        assert np.any(np.abs(independent - block) > margin[:num_rounds, :num_rounds])


def test_blocks_of_a_restarted_strategy_are_independent():
    strategy = restarts.Restarted(_PRODUCTION, (0, 4, 6))
    num_rounds, size = 9, 30_000
    rows = _emitted(strategy.noise_recipe(), num_rounds, size).reshape(2 * num_rounds, size)
    matrix = strategy.noise_matrix(num_rounds)
    expected = np.kron(np.eye(2), matrix @ matrix.T)
    margin = _margin(expected, size)
    assert np.all(np.abs(rows @ rows.T / size - expected) < margin)
    # Power: the same strategy without restarts is far away.
    unbroken = _PRODUCTION.noise_matrix(num_rounds)
    difference = unbroken @ unbroken.T - matrix @ matrix.T
    assert np.any(np.abs(difference) > margin[:num_rounds, :num_rounds])


def _margin(covariance, num_samples):
    """Six standard errors of a sample covariance of Gaussians with mean zero."""
    variance = np.diag(covariance)
    return 6 * np.sqrt((np.outer(variance, variance) + covariance**2) / num_samples)


def _emitted(recipe, num_rounds, size):
    """Unit noise of two tensors, float64, shape [2, num_rounds, size]."""
    stream = noise_stream.NoiseStream(recipe, [[size], [size // 2, 2]])
    step = tf.function(stream.next)
    seed = stream.initial_seed(tf.constant([42, 43], tf.int64))
    buffer = stream.initial_buffer()
    tensors = []
    for t in range(num_rounds):
        noise, buffer = step(buffer, tf.constant(t, tf.int64), seed)
        tensors.append([np.ravel(tensor) for tensor in noise])
    return np.swapaxes(np.asarray(tensors, np.float64), 0, 1)


@pytest.mark.parametrize(
    "rounds_at_once", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7, 23))]
)
def test_blocks_of_any_size_have_the_same_noise_bit_for_bit(rounds_at_once):
    alone = _emitted(dense.Dense(_DENSE).noise_recipe(), 23, 50)
    together = dense.Dense(_DENSE, rounds_at_once=rounds_at_once)
    np.testing.assert_array_equal(_emitted(together.noise_recipe(), 23, 50), alone)
    again = restarts.Restarted(together, (0, 5)).noise_recipe()
    single = restarts.Restarted(dense.Dense(_DENSE), (0, 5)).noise_recipe()
    np.testing.assert_array_equal(_emitted(again, 23, 50), _emitted(single, 23, 50))


def test_blocks_of_banded_inverses_have_the_same_noise_bit_for_bit():
    row = inverse_banded.InverseBanded.bisr(5).inverse_coefficients
    alone = _emitted(noise_recipe.InverseBandedNoise((row,)), 13, 20)
    together = _emitted(noise_recipe.InverseBandedNoise((row,), 4), 13, 20)
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("starts", [(1, 3), (0, 3, 3), (0, 5, 2), ()])
def test_bad_restarts_are_refused(starts):
    recipe = noise_recipe.RestartedNoise(noise_recipe.IdentityNoise(), starts)
    with pytest.raises(ValueError, match="starts must begin with 0 and increase"):
        noise_stream.NoiseStream(recipe, [[2]])


def test_rounds_are_bounded_by_the_block_and_by_the_strategy():
    recipe = noise_recipe.RestartedNoise(noise_recipe.TreeNoise(2, True), (0, 3))
    stream = noise_stream.NoiseStream(recipe, [[2]], max_rounds=5)
    seed = tf.constant([1, 2], tf.int64)

    def run(t):
        return stream.next(stream.initial_buffer(), tf.constant(t, tf.int64), seed)

    run(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="defined for 5 rounds"):
        run(5)
    unbounded = noise_stream.NoiseStream(recipe, [[2]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="defined for 3 rounds"):
        unbounded.next(stream.initial_buffer(), tf.constant(6, tf.int64), seed)


def test_a_graph_is_freed_after_its_noise():
    """Also a graph of TensorFlow 1, in which TFF traces: functions could keep it for good."""

    def next_round():
        stream = noise_stream.NoiseStream(tree.Tree(9).noise_recipe(), [(3,)])
        stream.next(
            stream.initial_buffer(), tf.constant(0, tf.int64), tf.constant([1, 2], tf.int64)
        )

    with tf.Graph().as_default() as graph:
        next_round()
        tf.function(next_round, autograph=False).get_concrete_function()
    is_alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert not is_alive()
