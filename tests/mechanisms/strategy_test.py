"""Tests of what all strategies share: names, and the refusal of what is none."""

import types

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.accounting import amplified_banded, calibrate, guarantee, planner
from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    blt_optimize,
    certificate,
    dense,
    identity,
    inverse_banded,
    noise_recipe,
    restarts,
    serialization,
    strategy,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(20, 5, 3)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("name", examples.ALL)
def test_matrices_and_variances_are_those_of_dense_algebra(name, num_rounds):
    examples.check_matrices(examples.ALL[name], num_rounds)


@pytest.mark.parametrize("name", ["tree", "two-banded", "dense", "restarted banded"])
def test_more_rounds_than_a_strategy_has_are_refused(name):
    made = examples.ALL[name]
    most = made.max_rounds
    for call in (
        made.prefix_noise_variance,
        made.noise_matrix,
        lambda rounds: made.sensitivity(schema_lib.MinSep(rounds, 1, 1)),
    ):
        with pytest.raises(ValueError, match=f"num_rounds must be (at most|in 1 ...) {most}"):
            call(most + 1)


@pytest.mark.parametrize(
    "made, recipe, copies",
    [
        (identity.Identity(), noise_recipe.IdentityNoise(), 0),
        (
            blt.Blt([0.9, 0.5], [0.2, 0.1]),
            noise_recipe.BufferedNoise((0.9, 0.5), (0.2, 0.1)),
            2,
        ),
        (
            banded.Banded([[2.0, 0.0], [1.0, 0.5]]),
            noise_recipe.BandedNoise(((2.0, 0.0), (1.0, 0.5))),
            1,
        ),
        (
            banded_toeplitz.BandedToeplitz([1, 0.5, 0.25]),
            noise_recipe.BandedNoise(((1.0, 0.5, 0.25),)),
            2,
        ),
        (
            inverse_banded.InverseBanded([1, -0.5]),
            noise_recipe.InverseBandedNoise(((1.0, -0.5),)),
            0,
        ),
    ],
)
def test_recipe_and_memory(made, recipe, copies):
    assert made.noise_recipe() == recipe
    assert made.memory_copies(100) == copies


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 64, 1000, 11_111])
@pytest.mark.parametrize(
    "made",
    [
        identity.Identity(),
        blt.Blt([0.99, 0.5], [0.3, 0.1]),
        blt.Blt([0.4, 0.1], [1.3, 0.1]),  # A decay of C⁻¹ is negative.
        tree.Tree(11_111),
        tree.Tree(11_111, variance_reduction=False),
        tree.FullTree(),
        banded_toeplitz.BandedToeplitz.fhu(7),
        banded_toeplitz.BandedToeplitz([2.0, -1.0, 0.3]),
        inverse_banded.InverseBanded.bisr(4),
        restarts.Restarted(inverse_banded.InverseBanded.bisr(4), (0, 3, 500)),
    ],
    ids=lambda made: made.name,
)
def test_extents_are_those_of_the_variances(made, num_rounds):
    for extent, variances in (
        (made.prefix_noise(num_rounds), made.prefix_noise_variance(num_rounds)),
        (made.round_noise(num_rounds), made.round_noise_variance(num_rounds)),
    ):
        assert extent == pytest.approx((np.max(variances), np.mean(variances)), rel=1e-10)


@pytest.mark.parametrize(
    "made, name",
    [
        (identity.Identity(), "identity"),
        (blt.Blt([0.9], [0.3]), "blt"),
        (tree.Tree(20), "tree"),
        (tree.Tree(20, variance_reduction=False), "tree-vanilla"),
        (tree.FullTree(), "tree-full"),
        (dense.Dense(np.eye(3)), "dense"),
        (banded.Banded(np.ones((4, 1))), "banded (1 band)"),
        (banded_toeplitz.BandedToeplitz.fhu(7), "banded-toeplitz (7 bands)"),
        (inverse_banded.InverseBanded.bisr(4), "inverse-banded (4 bands)"),
        (restarts.Restarted(tree.Tree(20), (0, 9)), "tree, restarted 1 time"),
        (
            restarts.Restarted(inverse_banded.InverseBanded.bisr(2), (0, 3, 9)),
            "inverse-banded (2 bands), restarted 2 times",
        ),
    ],
)
def test_a_strategy_says_its_name(made, name):
    assert made.name == name
    claim = guarantee.dp_ftrl_guarantee(
        made, noise_multiplier=1.0, schema=schema_lib.MinSep(3, 2, 2), delta=1e-6
    )
    assert claim.mechanism == name


@pytest.mark.parametrize(
    "value, message",
    [
        (blt_optimize.search(_SCHEMA), "got a BltResult: pass its strategy, .*=result.strategy"),
        (
            types.SimpleNamespace(private_round=types.SimpleNamespace(strategy=tree.Tree(4))),
            "got a SimpleNamespace: pass its strategy, .*=factory.private_round.strategy",
        ),
        ("blt", r"got 'blt': make one with mechanisms.table.build\(name, schema\)"),
        (None, "got None: make one with"),
        (tree.Tree, "got the class Tree: make one with"),
        (np.eye(3), "got a ndarray: make one with"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(value, message):
    with pytest.raises(ValueError, match="strategy must be a strategy of .*" + message):
        strategy.check_strategy(value)
    with pytest.raises(ValueError, match="mine must be a strategy of .*" + message):
        strategy.check_strategy(value, "mine")


_CONSUMERS = {
    "dp_ftrl_guarantee": lambda value: guarantee.dp_ftrl_guarantee(
        value, noise_multiplier=1.0, schema=_SCHEMA, delta=1e-6
    ),
    "epsilon_so_far": lambda value: guarantee.epsilon_so_far(
        value, noise_multiplier=1.0, schema=_SCHEMA, rounds_released=0, delta=1e-6
    ),
    "calibrate_noise_multiplier": lambda value: calibrate.calibrate_noise_multiplier(
        value, _SCHEMA, target_rho=0.5
    ),
    "noise_in_sum": lambda value: planner.noise_in_sum(
        value, num_rounds=20, noise_multiplier=1.0, report_goal=5
    ),
    "AmplifiedBanded": lambda value: amplified_banded.AmplifiedBanded.from_strategy(
        value, noise_multiplier=1.0, num_rounds=20, num_groups=5, sampling_probability=0.1
    ),
    "certify": lambda value: certificate.certify(value, _SCHEMA),
    "strategy_to_json": serialization.strategy_to_json,
    "Restarted": lambda value: restarts.Restarted(value, (0, 10)),
    "whole_run": lambda value: restarts.whole_run(value, 20, (0, 10)),
}


@pytest.mark.parametrize("consumer", _CONSUMERS)
@pytest.mark.parametrize("value", [blt_optimize.search(_SCHEMA), "blt", None], ids=type)
def test_it_is_checked_where_a_strategy_is_wanted(consumer, value):
    with pytest.raises(ValueError, match="must be a strategy of tff_dpftrl.mechanisms"):
        _CONSUMERS[consumer](value)
