"""Chains of changes against exact values of Gaussian mechanisms, and pairs of groups."""

from __future__ import annotations

import math

import pytest

from tff_dpftrl.accounting import gaussian, mixture_of_gaussians, neighbours


@pytest.mark.parametrize("changes", [2, 3, 8])
@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0])
def test_a_chain_is_above_the_exact_group(mu, changes):
    exact = gaussian.epsilon(changes * mu, 1e-6)
    chain = neighbours.epsilon_by_changes(lambda delta: gaussian.epsilon(mu, delta), changes, 1e-6)
    assert exact <= chain
    if math.isinf(chain):
        return
    # The two conditions of the lemma, at the delta of one change that was found.
    delta = gaussian.delta(mu, chain / changes)
    assert delta * sum(math.exp(i * chain / changes) for i in range(changes)) <= 1.001e-6
    if mu <= 0.5:
        assert chain <= 1.4 * exact


def test_one_change_is_itself_and_what_is_out_of_reach_is_infinite():
    def epsilon(delta):
        return gaussian.epsilon(0.7, delta)

    assert neighbours.epsilon_by_changes(epsilon, 1, 1e-5) == epsilon(1e-5)
    assert neighbours.epsilon_by_changes(lambda delta: math.inf, 2, 1e-5) == math.inf
    assert neighbours.epsilon_by_changes(lambda delta: 0.0, 4, 1e-5) == 0.0


@pytest.mark.parametrize("relation", neighbours.RELATIONS)
@pytest.mark.parametrize("group_of", [1, 3])
def test_pairs_are_below_the_chain(relation, group_of):
    which = neighbours.Neighbours(relation, group_of)

    def one(delta):
        pair = mixture_of_gaussians.els(2.0, 0.03, 2)
        return mixture_of_gaussians.epsilon(pair, num_steps=40, delta=delta)

    pair = mixture_of_gaussians.epsilon(which.pair(2.0, 0.03, 2), num_steps=40, delta=1e-5)
    assert pair <= neighbours.epsilon_by_changes(one, which.num_changes, 1e-5) * (1 + 1e-6)
    assert pair >= one(1e-5)
    if which.num_changes == 1:
        assert pair == one(1e-5)


def test_what_differs_is_said():
    assert neighbours.Neighbours().sentence == "the contributions of a user are replaced by zeros"
    assert "other data, for 4 users together" in neighbours.Neighbours("substitute", 4).sentence


@pytest.mark.parametrize(
    "arguments, message", [(("replace",), "one of zero-out"), (("zero-out", 0), "group_of")]
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        neighbours.Neighbours(*arguments)
