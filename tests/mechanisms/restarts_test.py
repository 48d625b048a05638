"""Tests of restarted strategies against block-diagonal matrices."""

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import (
    banded_toeplitz,
    blt,
    dense,
    identity,
    noise_recipe,
    restarts,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

_RISING = "rising banded Toeplitz"
_BASES = ("identity", "tree", "vanilla tree", "blt", "banded", "fhu", _RISING, "bisr", "dense")
_STARTS = [(0,), (0, 3), (0, 5, 7), (0, 1, 2, 11)]


@pytest.fixture(params=_BASES)
def base(request):
    return examples.ALL[request.param]


@pytest.mark.parametrize("starts", _STARTS)
@pytest.mark.parametrize("num_rounds", [1, 4, 12])
def test_matrices_and_variances(base, starts, num_rounds):
    strategy = restarts.Restarted(base, starts)
    begun = [s for s in starts if s < num_rounds]
    ends = [*begun[1:], num_rounds]
    assert strategy.block_lengths(num_rounds) == [e - s for s, e in zip(begun, ends, strict=True)]
    matrix, noise = strategy.strategy_matrix(num_rounds), strategy.noise_matrix(num_rounds)
    assert matrix.shape[1] == noise.shape[0] == num_rounds
    # No noise of one block is made of another block's draws.
    for start, end in zip(begun, ends, strict=True):
        own = np.any(matrix[:, start:end], axis=1)
        assert not np.any(noise[start:end][:, ~own])
    examples.check_matrices(strategy, num_rounds)


@pytest.mark.parametrize("starts", _STARTS)
def test_sensitivity_is_never_below_enumeration(base, starts):
    strategy = restarts.Restarted(base, starts)
    matrix = strategy.strategy_matrix(11)
    for min_sep in range(1, 12):
        for k in (1, 2, 3, 4):
            schema = schema_lib.MinSep(11, min_sep, k)
            truth = examples.worst(matrix, schema)
            result = strategy.sensitivity(schema)
            assert result.squared >= truth * (1 - 1e-12)
            if result.exact:
                assert result.squared == pytest.approx(truth, rel=1e-12)
            elif base is not examples.ALL[_RISING]:
                assert result.squared <= 1.2 * truth
            if isinstance(base, identity.Identity | tree.Tree | blt.Blt):
                assert result.exact


def test_a_single_block_changes_nothing(base):
    whole, single = base, restarts.Restarted(base, (0,))
    np.testing.assert_array_equal(whole.noise_matrix(9), single.noise_matrix(9))
    for min_sep in (2, 3, 5):
        schema = schema_lib.MinSep(9, min_sep, 3)
        expected, result = whole.sensitivity(schema), single.sensitivity(schema)
        if result.exact:
            assert result.squared == pytest.approx(expected.squared, rel=1e-12)
        else:  # A bound, perhaps a weaker one than without restarts.
            assert result.squared >= expected.squared * (1 - 1e-12)


def test_the_schema_runs_across_restarts():
    # Blocks of 4 rounds; with b = 5, no client is in two rounds of one block, but
    # three blocks would each allow one participation alone, and only two fit.
    strategy = restarts.Restarted(tree.Tree(4), (0, 4, 8))
    one_block = tree.Tree(4).sensitivity(schema_lib.MinSep(4, 5, 3)).squared
    assert strategy.sensitivity(schema_lib.MinSep(12, 5, 3)).squared == 3 * one_block
    assert strategy.sensitivity(schema_lib.MinSep(12, 5, 2)).squared == 2 * one_block
    assert strategy.sensitivity(schema_lib.MinSep(12, 6, 3)).squared == 2 * one_block


def test_restarts_of_the_gboard_paper_lower_the_sensitivity_of_long_runs():
    starts = (0, 128, 1152, 2176)
    strategy = restarts.Restarted(tree.Tree(1024), starts)
    schema = schema_lib.MinSep.from_gap(2800, 371, 7)
    result = strategy.sensitivity(schema)
    assert result.exact
    assert result.squared < tree.Tree(2800).sensitivity(schema).squared


def test_monotone_blocks_at_a_realistic_size():
    production = blt.Blt((0.99, 0.9), (0.1, 0.2))
    strategy = restarts.Restarted(production, (0, 128, 1152))
    schema = schema_lib.MinSep(2000, 400, 5)
    result = strategy.sensitivity(schema)
    assert result.exact
    # An independent bound and a pattern: the Gram matrix of the whole block-diagonal C.
    general = restarts.Restarted(dense.Dense(production.strategy_matrix(1024)), (0, 128, 1152))
    assert general.sensitivity(schema).squared == pytest.approx(result.squared, rel=1e-9)


@pytest.mark.parametrize("coefficients", [(1.0, 0.5, 0.3), (1.0, 0.1, 0.8), (1.0, -0.5, 0.3)])
def test_too_much_work_gives_a_bound_and_says_so(coefficients, monkeypatch):
    strategy = restarts.Restarted(banded_toeplitz.BandedToeplitz(coefficients), (0, 3, 8))
    schema = schema_lib.MinSep(12, 1, 5)
    searched = strategy.sensitivity(schema)
    monkeypatch.setattr(restarts, "_MAX_WORK", 0)
    bound = strategy.sensitivity(schema)
    assert not bound.exact
    assert bound.squared >= searched.squared


def test_recipe_and_memory(base):
    strategy = restarts.Restarted(base, [0, 5])
    assert strategy.noise_recipe() == noise_recipe.RestartedNoise(base.noise_recipe(), (0, 5))
    assert strategy.memory_copies(12) == base.memory_copies(7)


@pytest.mark.parametrize("starts", [(), (1, 2), (0, 3, 3), (0, 5, 2), (0, 2.5)])
def test_bad_starts_are_refused(starts):
    with pytest.raises(ValueError, match="starts must"):
        restarts.Restarted(identity.Identity(), starts)


def test_blocks_longer_than_the_base_are_refused():
    with pytest.raises(ValueError, match="at most 15 rounds apart"):
        restarts.Restarted(tree.Tree(12), (0, 16))
    strategy = restarts.Restarted(tree.Tree(12), (0, 10))
    assert strategy.max_rounds == 25
    with pytest.raises(ValueError, match="num_rounds must be in 1 ... 25"):
        strategy.noise_matrix(26)


def test_restarts_do_not_nest():
    inner = restarts.Restarted(identity.Identity(), (0, 2))
    with pytest.raises(ValueError, match="restarts of its own"):
        restarts.Restarted(inner, (0, 8))


def test_starts_of_a_schedule():
    assert restarts.starts(2000, every=1024, first=128) == (0, 128, 1152)
    assert restarts.starts(2048, every=1024) == (0, 1024)
    assert restarts.starts(128, every=1024, first=128) == (0,)
    assert restarts.longest_block(2000, (0, 128, 1152)) == 1024
    assert restarts.longest_block(2000, (0,)) == 2000
    for bad in ({"every": 0}, {"every": 5, "first": 0}, {"every": 2.5}):
        with pytest.raises(ValueError, match="(every|first) must be"):
            restarts.starts(10, **bad)


def test_a_whole_run_from_a_block():
    base = tree.Tree(12)  # up to 15 rounds
    assert restarts.whole_run(base, 15) is base
    assert restarts.whole_run(base, 40, (0, 10, 25)) == restarts.Restarted(base, (0, 10, 25))
    for starts in ((0,), (0, 10)):
        with pytest.raises(ValueError, match="at most 15 rounds, got (40|30): .*--rounds"):
            restarts.whole_run(base, 40, starts)
