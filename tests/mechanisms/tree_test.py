"""Tests of the tree strategies against materialised matrices."""

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import noise_recipe, tree
from tff_dpftrl.participation import schema as schema_lib

_STRATEGIES = {
    "vanilla": lambda n: tree.Tree(n, variance_reduction=False),
    "online": lambda n: tree.Tree(n),
    "full": lambda n: tree.FullTree(),
}


@pytest.mark.parametrize("name", _STRATEGIES)
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 100])
def test_closed_forms_match_materialised_matrices(name, num_rounds):
    examples.check_matrices(_STRATEGIES[name](num_rounds), num_rounds)


def test_matrix_of_three_rounds_has_the_completed_nodes():
    expected = [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]]
    np.testing.assert_array_equal(tree.Tree(3).strategy_matrix(3), expected)
    assert tree.completed_nodes(3) == [(0, 0), (0, 1), (1, 0), (0, 2)]


def test_noise_of_a_round_uses_no_later_draw():
    num_rounds = 21
    noise = tree.Tree(num_rounds).noise_matrix(num_rounds)
    completed_in = [t for t in range(num_rounds) for _ in range(((t + 1) & -(t + 1)).bit_length())]
    for t, row in enumerate(noise):
        assert not np.any(row[np.asarray(completed_in) > t])


def test_variance_reduction_reduces_and_full_reduces_most():
    num_rounds = 100
    vanilla, online, full = (
        _STRATEGIES[name](num_rounds).prefix_noise_variance(num_rounds)
        for name in ("vanilla", "online", "full")
    )
    assert np.all(full <= online + 1e-12)
    assert np.all(online <= vanilla)
    assert full.mean() < online.mean() < vanilla.mean()


def test_vanilla_prefix_variance_counts_the_ones_of_the_round():
    variances = tree.Tree(1000, variance_reduction=False).prefix_noise_variance(1000)
    assert variances.tolist() == [bin(t).count("1") for t in range(1, 1001)]


def test_honaker_variance_of_a_complete_tree():
    # Honaker (2015): 2^h / (2^(h+1) - 1) for a tree of height h.
    variances = tree.Tree(1024).prefix_noise_variance(1024)
    assert variances[1023] == pytest.approx(1024 / 2047, rel=1e-15)


def test_a_longer_plan_changes_nothing_but_the_levels():
    schema = schema_lib.MinSep(20, 3, 4)
    short, long = tree.Tree(20), tree.Tree(500)
    assert short.sensitivity(schema) == long.sensitivity(schema)
    np.testing.assert_array_equal(short.noise_matrix(20), long.noise_matrix(20))
    assert long.noise_recipe() == noise_recipe.TreeNoise(9, True)


@pytest.mark.parametrize("num_rounds", [1, 2, 7, 8, 2000])
def test_levels_suffice_up_to_max_rounds(num_rounds):
    strategy = tree.Tree(num_rounds)
    assert num_rounds <= strategy.max_rounds < 2 * num_rounds + 1
    tallest = max(level for level, _ in tree.completed_nodes(strategy.max_rounds))
    assert strategy.num_levels == tallest + 1
    assert strategy.memory_copies(num_rounds) == strategy.num_levels
    assert tree.Tree(num_rounds, variance_reduction=False).memory_copies(num_rounds) == 0
    with pytest.raises(ValueError, match="num_rounds must be at most"):
        strategy.prefix_noise_variance(strategy.max_rounds + 1)


def test_large_horizons_need_no_matrix():
    num_rounds = 10**6
    online = tree.Tree(num_rounds)
    # No more than one node of variance <= 1 a level.
    assert online.max_error(num_rounds) ** 2 <= online.num_levels
    assert tree.FullTree().max_error(num_rounds) <= online.max_error(num_rounds)
    assert online.round_noise_variance(num_rounds).shape == (num_rounds,)


def test_full_variance_reduction_cannot_be_streamed():
    with pytest.raises(ValueError, match="cannot be run"):
        tree.FullTree().noise_recipe()
    assert tree.FullTree().memory_copies(13) == len(tree.completed_nodes(13))


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_bad_number_of_rounds_is_refused(value):
    with pytest.raises(ValueError, match="num_rounds must be (an integer|at least 1), got"):
        tree.Tree(value)
    with pytest.raises(ValueError, match="FullTree"):
        tree.Tree(8, "full")
