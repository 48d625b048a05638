"""What runs have spent together, against sums that are computed here in another way."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from tff_dpftrl.accounting import (
    composition,
    facts,
    mixture_of_gaussians,
    statement,
    statement_text,
)

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


def test_rounds_of_b_min_sep_sampling_are_no_sampled_steps():
    pair = mixture_of_gaussians.uls(2.0, 0.02)
    parameters = {"noise_multiplier": 2.0, "sampling_probability": 0.02, "num_rounds_charged": 100}
    epsilon = mixture_of_gaussians.epsilon(pair, num_steps=100, delta=_DELTA)
    steps = composition.SampledSteps.of_statement(parameters, epsilon, _DELTA)
    assert steps is not None and steps.num_steps == 100
    other = {**parameters, "sampling": "b-min-sep", "min_sep": 5}
    assert composition.SampledSteps.of_statement(other, epsilon, _DELTA) is None


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


def _of_steps(name, noise, probability, group_size, steps, *, chosen=0.0, delta=1e-6):
    """Statement of DP-FedAvg or ELS, as far as it is read."""
    pair = mixture_of_gaussians.els(noise, probability, group_size)
    epsilon = mixture_of_gaussians.epsilon(pair, num_steps=steps, delta=delta)
    parameters = {"noise_multiplier": noise, "sampling_probability": probability}
    if group_size == 1:
        parameters["num_rounds_charged"] = steps
    else:
        parameters |= {
            "sampling": "example",
            "group_size": group_size,
            "num_steps_charged": steps,
            "group_size_epsilon": chosen,
        }
    stated = {"epsilon": epsilon + chosen, "delta": delta, "rho_zcdp": None}
    return composition.Spent.from_json(name, {**stated, "parameters": parameters})


def test_loss_distributions_of_sampled_runs_are_convolved():
    runs = [
        _of_steps("rounds", 2.0, 0.05, 1, 100),
        _of_steps("examples", 3.0, 0.01, 3, 50, chosen=0.125),
        _gaussian("passes", 0.3),
    ]
    total = composition.compose(runs)
    assert total.delta == _DELTA
    assert total.how == "privacy loss distributions convolved"
    added = math.fsum(run.epsilon for run in runs)
    assert total.epsilon < 0.8 * added
    assert total.epsilon == pytest.approx(0.125 + _by_dp_accounting(), rel=5e-3)
    assert total.epsilon >= 0.125 + _by_dp_accounting(pessimistic=False)


def _by_dp_accounting(pessimistic=True):
    """The same runs, by dp_accounting's loss distributions on a grid, rounded up or down."""
    make = functools.partial(
        privacy_loss_distribution.from_mixture_gaussian_mechanism,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=5e-3,
    )
    losses = [
        make(2.0, [0.0, 1.0], [0.95, 0.05]).self_compose(100),
        make(3.0, [0, 1, 2, 3], stats.binom.pmf(range(4), 3, 0.01)).self_compose(50),
        make(1.0, [0.3], [1.0]),
    ]
    return functools.reduce(lambda a, b: a.compose(b), losses).get_epsilon_for_delta(_DELTA)


def test_a_statement_whose_parameters_do_not_give_its_epsilon_is_added_up():
    run = _of_steps("a", 2.0, 0.05, 1, 100)
    assert run.steps == composition.SampledSteps(2.0, 0.05, 1, 100)
    stated = {"epsilon": 1.5 * run.epsilon, "delta": 1e-6, "rho_zcdp": None}
    parameters = {"noise_multiplier": 2.0, "sampling_probability": 0.05, "num_rounds_charged": 100}
    other = composition.Spent.from_json("b", {**stated, "parameters": parameters})
    assert other.steps is None
    total = composition.compose([run, other])
    assert total.epsilon == pytest.approx(2.5 * run.epsilon)
    assert total.delta == pytest.approx(2e-6)
    for broken in (
        {"num_rounds_charged": 1.5},
        {"noise_multiplier": "2"},
        {"noise_multiplier": 0.0},
    ):
        stated["parameters"] = parameters | broken
        assert composition.Spent.from_json("c", stated).steps is None


def test_one_sampled_run_costs_what_it_states():
    run = _of_steps("a", 2.0, 0.05, 2, 100, chosen=0.1)
    total = composition.compose([run])
    assert (total.epsilon, total.delta) == (run.epsilon, run.delta)
    # Written to a manifest and read again, it is the same.
    again = composition.Spent(**json.loads(json.dumps(dataclasses.asdict(run))))
    assert again == run


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
    assert says in statement_text.markdown(made).split("## Setting")[0]
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
