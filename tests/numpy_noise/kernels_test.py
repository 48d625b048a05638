"""Kernels, run on a basis, are the noise of the strategy's dense matrix."""

import typing

import numpy as np
import pytest

from tests.numpy_noise.example_strategies import ROUNDS, STRATEGIES
from tff_dpftrl.mechanisms import dense, noise_recipe
from tff_dpftrl.numpy_noise import kernels


def _run_on_basis(recipe):
    """Map from new draws to noise, [rounds, rounds], and the number of draws of each round.

    Each round is run twice.
    """
    kernel, columns, kept, rows, counts = kernels.build(recipe), {}, {}, [], []
    # Anything in the buffer of a block's first round must be ignored.
    buffer = np.full([kernel.num_buffers, ROUNDS], 1e6, np.float32)
    for t in range(ROUNDS):
        drawn = []
        new = kernel.new_draw(t)
        assert columns.setdefault(new, t) == t
        if kernel.num_seeds:
            kept[kernel.slot(new)] = new
            assert kept.keys() <= set(range(kernel.num_seeds))

        def draw(index, drawn=drawn, new=new):
            assert index == new or kept[kernel.slot(index)] == index
            drawn.append(index)
            return np.eye(ROUNDS, dtype=np.float32)[columns[index]]

        interrupted, _ = kernel.step(buffer, t, draw)
        noise, buffer = kernel.step(buffer, t, draw)
        np.testing.assert_array_equal(noise, interrupted)
        assert noise.dtype == buffer.dtype == np.float32
        assert not np.shares_memory(noise, buffer)
        rows.append(noise)
        counts.append(len(drawn) / 2)
    return np.stack(rows), counts


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_has_the_covariance_of_the_dense_matrix(name):
    strategy = STRATEGIES[name]
    streamed, _ = _run_on_basis(strategy.noise_recipe())
    matrix = strategy.noise_matrix(ROUNDS)
    covariance = matrix @ matrix.T
    # float32 rounds each of at most 31 terms a round, of a size of at most the largest entry.
    scale = np.max(np.abs(covariance))
    np.testing.assert_allclose(streamed @ streamed.T, covariance, atol=1e-5 * scale)
    # Each round has one new draw, and none of a later round, so that this is Cholesky's factor.
    factor = np.linalg.cholesky(covariance)
    scale = np.max(np.abs(factor))
    np.testing.assert_allclose(streamed, factor, atol=1e-5 * scale)


def _trailing_ones(t):
    return len(f"{t:b}") - len(f"{t:b}".rstrip("1"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_draw_is_made_in_vain(name):
    of_round = {
        "vanilla-tree": lambda t: 1 + _trailing_ones(t),
        "bisr": lambda t: min(t + 1, 5),
        "bifr": lambda t: min(t + 1, 5),
        "lambda-cgd": lambda t: min(t + 1, 2),
        "dense": lambda t: t + 1,
        "dense-in-blocks": lambda t: 1 if t % 6 else t + 1,
    }.get(name, lambda t: 1)
    _, counts = _run_on_basis(STRATEGIES[name].noise_recipe())
    assert counts == [of_round(t) for t in range(ROUNDS)]


def test_blocks_of_any_size_have_the_same_noise_bit_for_bit():
    matrix = STRATEGIES["dense"].strategy_matrix(ROUNDS)

    def emitted(rounds_at_once):
        kernel = kernels.build(dense.Dense(matrix, rounds_at_once=rounds_at_once).noise_recipe())
        draws = np.random.default_rng(3).normal(size=(ROUNDS, 9)).astype(np.float32)
        buffer, rows = np.full((kernel.num_buffers, 9), 1e6, np.float32), []
        for t in range(ROUNDS):
            noise, buffer = kernel.step(buffer, t, lambda index: draws[index].copy())
            rows.append(noise)
        return np.stack(rows)

    for rounds_at_once in (2, 5, ROUNDS):
        np.testing.assert_array_equal(emitted(rounds_at_once), emitted(1))


def test_strategies_can_be_told_apart():
    noise = STRATEGIES["tree"].noise_matrix(ROUNDS)
    vanilla = STRATEGIES["vanilla-tree"].noise_matrix(ROUNDS)
    assert np.max(np.abs(noise @ noise.T - vanilla @ vanilla.T)) > 0.1


def test_every_kind_of_recipe_has_a_kernel_and_an_example():
    kinds = set(typing.get_args(noise_recipe.BlockRecipe))
    assert kinds <= set(kernels.build.registry)
    assert kinds == {type(strategy.noise_recipe()) for strategy in STRATEGIES.values()}


def test_recipes_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="recipe for one block"):
        kernels.build(noise_recipe.RestartedNoise(noise_recipe.IdentityNoise(), (0,)))
