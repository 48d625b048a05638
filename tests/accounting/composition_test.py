"""What runs have spent together, against sums that are computed here in another way."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.accounting import composition, facts, statement

_DELTA = 1e-5


def _gaussian(name, mu):
    return composition.Spent(name, _DELTA, _epsilon(mu), mu * mu / 2)


def _delta(mu, epsilon):
    """Balle & Wang 2018, theorem 8."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )


def _epsilon(mu):
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(mu, middle) > _DELTA else (low, middle)
    return high


def test_gaussian_mechanisms_are_one_with_the_root_of_the_summed_squares():
    mus = [0.3, 0.7, 1.1]
    total = composition.compose([_gaussian(str(mu), mu) for mu in mus])
    assert total.delta == _DELTA
    assert total.epsilon == pytest.approx(_epsilon(math.hypot(*mus)), rel=1e-6)
    # Two releases x + z₁, x + z₂ tell as much as their mean weighted by precision.
    precision = np.sum(np.square(mus))
    assert _delta(math.sqrt(precision), total.epsilon) == pytest.approx(_DELTA, rel=1e-4)


def test_sampled_runs_add_up():
    runs = [composition.Spent("a", 1e-6, 2.0), composition.Spent("b", 1e-7, 0.5)]
    total = composition.compose(runs)
    assert (total.epsilon, total.delta) == (2.5, pytest.approx(1.1e-6))
    total = composition.compose([*runs, _gaussian("c", 0.4)])
    assert total.epsilon == pytest.approx(2.5 + _epsilon(0.4), rel=1e-6)
    assert total.delta == pytest.approx(1.1e-6 + _DELTA)


def test_the_larger_delta_of_gaussian_mechanisms_is_taken():
    one = composition.Spent("a", 1e-8, 1.0, 0.02)
    total = composition.compose([one, _gaussian("b", 0.5)])
    assert total.delta == _DELTA
    assert total.epsilon == pytest.approx(_epsilon(math.sqrt(2 * 0.02 + 0.25)), rel=1e-6)


@pytest.mark.parametrize(
    "other",
    [composition.Spent("b"), composition.Spent("b", 1e-5, math.inf)],
    ids=["no guarantee", "infinite"],
)
def test_a_run_without_a_guarantee_leaves_none(other):
    assert composition.compose([_gaussian("a", 0.5), other]) is None


def test_a_run_on_examples_is_not_added_to_one_on_users():
    """A user with four of the examples has four times the μ of one example."""
    stated = {"epsilon": 1.0, "delta": 1e-5, "rho_zcdp": 0.1}
    older = composition.Spent.from_json("older", stated)
    phone = composition.Spent.from_json("phone", {**stated, "unit_of_privacy": "device"})
    rows = composition.Spent.from_json("rows", {**stated, "unit_of_privacy": "example"})
    assert composition.compose([older, rows]) is None
    assert composition.compose([older, phone]) is not None
    assert composition.compose([rows, rows]) is not None
    says, total = composition.with_earlier_runs(older, [rows], same_users=True)
    assert total is None and "nothing is promised for all together" in says
    assert "protect single examples, others" in says and "trained on the same" not in says
    says, total = composition.with_earlier_runs(rows, [rows], same_users=None)
    assert total is not None and "on the same examples is not known. For what is in all" in says
    with pytest.raises(TypeError, match="unit_of_privacy"):
        composition.Spent.from_json("a", {**stated, "unit_of_privacy": 3})


def test_a_statement_composes_with_its_own_unit():
    made = _sampled(earlier_runs=[composition.Spent("r", 1e-6, 1.5, unit_of_privacy="example")])
    assert "epsilon_with_earlier_runs" not in made.parameters
    assert "protect single examples, others" in made.headline_caveats[0]


@pytest.mark.parametrize("value", [-1.0, "1", True, math.nan])
def test_a_statement_with_an_impossible_cost_is_refused(value):
    stated = {"epsilon": value, "delta": 1e-5, "rho_zcdp": None}
    with pytest.raises(TypeError):
        composition.Spent.from_json("a", stated)


def _sampled(**options):
    claim = statement.SampledClaim(
        mechanism="ULS",
        epsilon=2.0,
        delta=1e-6,
        accounting="By hand.",
        sampling="Everybody is in a step at random.",
    )
    return statement.sampled_statement(claim, facts.Facts(**options))


def test_a_statement_gives_the_sum_over_its_chain_beside_epsilon():
    chain = [composition.Spent("second", 1e-6, 3.0), composition.Spent("first", 1e-6, 1.5)]
    made = _sampled(earlier_runs=chain, same_users=True)
    (says,) = made.headline_caveats
    assert "run 'second' (ε = 3 at δ = 1e-06), which began with those of the run 'first'" in says
    assert "All of these runs trained on the same users." in says
    assert "ε = 6.5 at δ = 3e-06" in says
    assert says in made.to_markdown().split("## Setting")[0]
    assert made.parameters["epsilon_with_earlier_runs"] == 6.5
    assert made.epsilon == 2.0


@pytest.mark.parametrize(
    "same, says", [(None, "is not known"), (False, "have other users, some of whom")]
)
def test_a_statement_says_whether_users_are_the_same(same, says):
    chain = [composition.Spent("first", 1e-6, 1.5)]
    assert says in _sampled(earlier_runs=chain, same_users=same).headline_caveats[0]


def test_a_chain_with_a_run_without_guarantee_promises_nothing_for_all_together():
    made = _sampled(earlier_runs=[composition.Spent("first")], same_users=True)
    assert "'first' (without a guarantee)" in made.headline_caveats[0]
    assert "nothing is promised for all together" in made.headline_caveats[0]
    assert "epsilon_with_earlier_runs" not in made.parameters


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
