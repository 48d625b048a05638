"""All that leaves a run, against dp_accounting's loss distributions and closed forms."""

import functools
import math

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, stats

from tff_dpftrl.accounting import mixture_of_gaussians, parts

_DELTA = 1e-6


def _epsilon_of_gaussian(mu, delta):
    """Balle & Wang 2018, theorem 8, solved here."""

    def excess(epsilon):
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta

    return optimize.brentq(excess, 0.0, 100.0, xtol=1e-12)


def _part(name=parts.VOCABULARY, **costs):
    return parts.Part(name, "something", **costs)


def test_gaussian_mechanisms_and_their_own_delta_and_epsilon_are_one():
    others = [
        _part(rho_zcdp=0.02, delta=1e-7),
        _part(parts.METRICS, noise_multiplier_of_round=20.0),
        _part(parts.MEDIAN, epsilon=0.125),
    ]
    whole = parts.compose(parts.GaussianRounds(0.9, 4), others, _DELTA)
    mu = math.sqrt(0.9**2 + 2 * 0.02 + 4 / 20.0**2)
    assert whole == pytest.approx(0.125 + _epsilon_of_gaussian(mu, 9e-7), rel=1e-8)
    alone = [
        cost.epsilon_alone for cost in parts.costs(parts.GaussianRounds(0.9, 4), "", others, 1e-6)
    ]
    assert alone[1:] == pytest.approx(
        [_epsilon_of_gaussian(0.2, 9e-7), _epsilon_of_gaussian(0.1, 1e-6), 0.125], rel=1e-8
    )
    assert alone[0] < whole < sum(alone)  # ε add up to more than losses do.


def test_without_parts_the_bits_are_those_of_the_weights():
    sampled = mixture_of_gaussians.epsilon(
        mixture_of_gaussians.uls(1.5, 0.05), num_steps=40, delta=_DELTA
    )
    assert parts.compose(parts.SampledRounds(1.5, 0.05, 40), (), _DELTA) == sampled
    assert parts.GaussianRounds(0.7, 3).mu_with(0.0, 0.0) == 0.7


def _loss(noise, sensitivities, probabilities, rounds, pessimistic):
    one = pld.from_mixture_gaussian_mechanism(
        noise,
        sensitivities,
        probabilities,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=1e-2,
    )
    return one.self_compose(rounds)


@pytest.mark.parametrize("group_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sampled_rounds_are_convolved_with_gaussian_mechanisms(group_size):
    others = [
        _part(rho_zcdp=0.045, delta=2e-7),
        _part(parts.METRICS, noise_multiplier_of_round=8.0),
        _part(parts.MEDIAN, epsilon=0.25),
    ]
    rounds = parts.SampledRounds(2.0, 0.05, 30, group_size)
    whole = parts.compose(rounds, others, _DELTA)
    joint = (2.0**-2 + 8.0**-2) ** -0.5
    counts = list(range(group_size + 1))

    def by_dp_accounting(pessimistic):
        losses = [
            _loss(joint, counts, stats.binom.pmf(counts, group_size, 0.05), 30, pessimistic),
            _loss(1.0, [0.3], [1.0], 1, pessimistic),
        ]
        together = functools.reduce(lambda a, b: a.compose(b), losses)
        return 0.25 + together.get_epsilon_for_delta(_DELTA - 2e-7)

    assert whole == pytest.approx(by_dp_accounting(True), rel=5e-3)
    assert whole >= by_dp_accounting(False)
    assert whole < sum(cost.epsilon_alone for cost in parts.costs(rounds, "", others, _DELTA))


def test_figures_of_rounds_alone_cost_what_sampled_noise_costs():
    rounds = parts.SampledRounds(2.0, 0.05, 60)
    figure = _part(parts.METRICS, noise_multiplier_of_round=4.0)
    alone = parts.costs(rounds, "", [figure], _DELTA)[1].epsilon_alone
    pair = mixture_of_gaussians.uls(4.0, 0.05)
    assert alone == mixture_of_gaussians.epsilon(pair, num_steps=60, delta=_DELTA)


class _Run:
    def epsilon(self, delta):
        return -0.1 * math.log(delta)


def test_rounds_with_a_bound_of_epsilon_alone_share_delta_and_take_no_figures():
    rounds = parts.BoundedRounds(_Run(), "bins")
    assert parts.compose(rounds, (), _DELTA) == _Run().epsilon(_DELTA)
    whole = parts.compose(rounds, [_part(rho_zcdp=0.02)], _DELTA)
    assert whole == pytest.approx(_Run().epsilon(9e-7) + _epsilon_of_gaussian(0.2, 1e-7), rel=1e-8)
    with pytest.raises(ValueError, match="'bins'.*cyclic"):
        parts.compose(rounds, [_part(noise_multiplier_of_round=3.0)], _DELTA)


def test_no_noise_has_no_bound():
    assert math.isinf(parts.compose(parts.SampledRounds(0.0, 0.05, 3), [_part()], _DELTA))
    assert math.isinf(parts.compose(parts.GaussianRounds(math.inf), [_part()], _DELTA))


@pytest.mark.parametrize(
    "costs",
    [{"rho_zcdp": -1.0}, {"delta": 1.0}, {"epsilon": math.nan}, {"noise_multiplier_of_round": 0.0}],
)
def test_a_part_without_a_cost_is_refused(costs):
    with pytest.raises(ValueError, match=next(iter(costs))):
        _part(**costs)


def test_parts_that_spend_delta_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="raise delta"):
        parts.compose(parts.GaussianRounds(1.0), [_part(delta=_DELTA)], _DELTA)
    with pytest.raises(ValueError, match="'words'"):
        _part("words")
