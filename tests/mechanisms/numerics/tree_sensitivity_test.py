"""Tests of the sensitivity of trees against enumeration and published rows."""

import random

import pytest

from tff_dpftrl.mechanisms.numerics import tree_sensitivity
from tff_dpftrl.participation import schema as schema_lib


def _enumerate(lengths, min_sep, max_participations):
    """Σ_nodes count², maximised over every pattern; rounds and nodes are bit masks."""
    nodes, first = [], 0
    for length in lengths:
        for level in range(length.bit_length()):
            mask = (1 << (1 << level)) - 1
            nodes += [mask << (first + (i << level)) for i in range(length >> level)]
        first += length
    best = 0
    for pattern in schema_lib.MinSep(first, min_sep, max_participations).patterns():
        rounds = sum(1 << t for t in pattern)
        best = max(best, sum(bin(rounds & node).count("1") ** 2 for node in nodes))
    return best


@pytest.mark.parametrize("num_rounds", range(1, 13))
def test_equals_enumeration(num_rounds):
    for min_sep in range(1, num_rounds + 2):
        for k in range(1, num_rounds + 1):
            expected = _enumerate([num_rounds], min_sep, k)
            assert tree_sensitivity.squared([num_rounds], min_sep, k) == (expected, True)
            assert tree_sensitivity.upper_bound_squared([num_rounds], min_sep, k) >= expected
            assert tree_sensitivity.earliest_pattern_squared(num_rounds, min_sep, k) <= expected


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))]
)
def test_equals_enumeration_on_larger_trees(seed):
    rng = random.Random(seed)
    num_rounds = rng.randint(20, 60)
    min_sep = rng.randint(5, 14)
    k = rng.randint(2, 4)
    expected = _enumerate([num_rounds], min_sep, k)
    assert tree_sensitivity.squared([num_rounds], min_sep, k) == (expected, True)


@pytest.mark.parametrize("seed", range(40))
def test_equals_enumeration_with_restarts(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(2, 3))]
    min_sep, k = rng.randint(1, 8), rng.randint(1, 4)
    expected = _enumerate(lengths, min_sep, k)
    assert tree_sensitivity.squared(lengths, min_sep, k) == (expected, True)
    assert tree_sensitivity.upper_bound_squared(lengths, min_sep, k) >= expected


@pytest.mark.parametrize("num_rounds", [1, 7, 8, 530, 1000])
@pytest.mark.parametrize("min_sep", [1, 4, 5, 55, 64])
@pytest.mark.parametrize("most", [1, 3, 8, 1000])
def test_the_earliest_pattern_is_counted_node_by_node(num_rounds, min_sep, most):
    rounds = range(0, num_rounds, min_sep)[:most]
    counts = [
        sum(t >> level == node for t in rounds)
        for level in range(num_rounds.bit_length())
        for node in range(num_rounds >> level)
    ]
    found = tree_sensitivity.earliest_pattern_squared(num_rounds, min_sep, most)
    assert found == sum(count**2 for count in counts)


def test_a_client_in_every_round_fills_every_node():
    num_rounds = 2**20
    expected = sum(2 ** (20 - level) * 4**level for level in range(21))
    assert tree_sensitivity.squared([num_rounds], 1, num_rounds) == (expected, True)


def test_one_participation_counts_the_height():
    assert tree_sensitivity.squared([10**6], 10**6, 5) == (20, True)
    assert tree_sensitivity.squared([1000, 2000, 500], 1, 1) == (11, True)


def test_exact_at_a_million_rounds():
    squared, exact = tree_sensitivity.squared([10**6], 1000, 10)
    assert exact
    assert tree_sensitivity.earliest_pattern_squared(10**6, 1000, 10) < squared
    assert squared < tree_sensitivity.upper_bound_squared([10**6], 1000, 10)


def test_out_of_budget_gives_a_bound_and_says_so():
    exact, is_exact = tree_sensitivity.squared([2000], 55, 36)
    bound, bound_is_exact = tree_sensitivity.squared([2000], 55, 36, max_work=10)
    assert is_exact and not bound_is_exact
    assert exact < bound <= 1.1 * exact
