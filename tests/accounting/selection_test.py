"""Tests of tff_dpftrl.accounting.selection."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import special

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian, selection

_DELTA = 1e-5


def _gaussian(mu):
    return lambda delta: gaussian.epsilon(mu, delta)


def _probabilities(num_runs):
    k = np.arange(1, num_runs.largest + 1)
    weights = (1 - num_runs.stopping) ** (k - 1.0)
    return k, weights / weights.sum()


def _exact_delta(mu, num_runs, epsilon):
    """δ of the best of K runs N(±mu, 1), each scored by its output, by the density of the best."""
    k, p = _probabilities(num_runs)
    y = np.linspace(-12, 12 + mu, 40_001)
    found = []
    for shifts in ((mu, 0.0), (0.0, mu)):
        densities = []
        for shift in shifts:
            below = special.ndtr(y - shift)
            slope = np.polynomial.polynomial.polyval(below, k * p)
            densities.append(np.exp(-((y - shift) ** 2) / 2) / math.sqrt(2 * math.pi) * slope)
        above = np.maximum(densities[0] - math.exp(epsilon) * densities[1], 0.0)
        found.append(float(above.sum() * (y[1] - y[0])))
    return max(found)


@pytest.mark.parametrize("mean, largest", [(2, 4), (10, 40)])
@pytest.mark.parametrize("mu", [0.3, 1.5])
def test_the_bound_is_above_the_exact_choice_and_below_that_by_renyi_divergences(mu, mean, largest):
    num_runs = selection.NumRuns(mean, largest)
    bound = selection.account([_gaussian(mu)], num_runs, _DELTA).epsilon
    assert _exact_delta(mu, num_runs, bound) <= _DELTA
    # The choice costs something: not even the ε of one run covers it.
    assert _exact_delta(mu, num_runs, gaussian.epsilon(mu, _DELTA)) > _DELTA
    one = dp_event.GaussianDpEvent(1 / mu)
    repeated = dp_event.RepeatAndSelectDpEvent(one, mean, 1)
    by_renyi = rdp.RdpAccountant().compose(repeated).get_epsilon(_DELTA)
    assert bound < by_renyi < 1.6 * bound


def _hockey_stick(p, q, epsilon):
    """δ of two distributions of a few values at each ε, in both directions."""
    factor = np.exp(epsilon)[..., None]
    ways = [np.maximum(one - factor * other, 0).sum(-1) for one, other in ((p, q), (q, p))]
    return np.maximum(*ways)


def _best_of(p, num_runs):
    """Distribution of the best of K values, the last one being the best."""
    k, weights = _probabilities(num_runs)
    below = np.concatenate([[0.0], np.minimum(np.cumsum(p), 1.0)])
    return np.diff((below[:, None] ** k) @ weights)


def test_no_pair_of_distributions_and_no_order_of_their_values_breaks_the_bound():
    """All orders of random pairs of four values, exactly; some come near to the bound."""
    rng, nearest, grid = np.random.default_rng(0), 0.0, np.linspace(0.0, 12.0, 601)
    for _ in range(100):
        pair = rng.dirichlet(np.full(4, rng.choice([0.2, 1.0, 5.0])), size=2)
        num_runs = selection.NumRuns(rng.choice([1.5, 4.0, 20.0]), int(rng.choice([20, 60])))
        delta = 10.0 ** rng.uniform(-4, -0.3)

        profile = _hockey_stick(*pair, grid)

        def run(at, profile=profile):
            return float(grid[np.argmax(profile <= at)]) if profile[-1] <= at else math.inf

        epsilon = selection.account([run], num_runs, delta).epsilon
        if math.isinf(epsilon):
            continue
        for order in itertools.permutations(range(4)):
            best = [_best_of(one[list(order)], num_runs) for one in pair]
            found = _hockey_stick(*best, epsilon)
            assert found <= delta
            nearest = max(nearest, found / delta)
    assert nearest > 0.3


def test_a_pure_guarantee_of_a_run_is_tripled():
    """Liu & Talwar 2019; Papernot & Steinke 2022, Corollary 3: (2 + η) ε for η = 1."""
    num_runs = selection.NumRuns(1e6, 10**9)
    found = selection.account([lambda delta: 0.5], num_runs, _DELTA)
    assert found.epsilon == pytest.approx(3 * 0.5)
    pure = dp_event.RepeatAndSelectDpEvent(dp_event.LaplaceDpEvent(1 / 0.5), 1e6, 1)
    assert rdp.RdpAccountant([1e12]).compose(pure).get_epsilon(1e-9) == pytest.approx(1.5, rel=1e-6)


def test_the_expected_number_is_that_of_the_distribution_and_of_what_is_drawn():
    num_runs = selection.NumRuns(3, 7)
    k, p = _probabilities(num_runs)
    assert num_runs.expected == pytest.approx(float(k @ p), rel=1e-12)
    drawn = np.array([num_runs.draw() for _ in range(4000)])
    assert drawn.min() == 1 and drawn.max() <= 7
    assert abs(drawn.mean() - num_runs.expected) < 6 * drawn.std() / math.sqrt(len(drawn))


@pytest.mark.parametrize("target", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("mean", [1.5, 10, 300])
def test_a_target_is_met_by_runs_with_little_more_noise_than_needed(target, mean):
    num_runs = selection.NumRuns(mean, 5 * math.ceil(mean))
    wanted = selection.targets(target, _DELTA, num_runs)
    assert target * (1 - 1e-8) < wanted.epsilon < target
    mu = gaussian.mu(*wanted.tail) * (1 - 1e-11)  # Less than the slack for rounding.
    assert wanted.are_met_by(_gaussian(mu)) and not wanted.are_met_by(_gaussian(1.001 * mu))
    found = selection.account([_gaussian(mu)], num_runs, _DELTA)
    assert target * 0.9999 < found.epsilon < target * 1.00001


def test_settings_share_the_worst_promise():
    num_runs = selection.NumRuns(5, 25)

    def pure(delta):
        return 0.7

    alone = selection.account([_gaussian(0.2)], num_runs, 1e-6)
    both = selection.account([pure, _gaussian(0.2)], num_runs, 1e-6)
    assert alone.epsilon < both.epsilon and both.are_met_by(pure)
    assert selection.account([lambda _: math.inf], num_runs, 1e-6).epsilon == math.inf


@pytest.mark.parametrize(
    "mean, largest, message",
    [(1, 5, "A single run is chosen among nothing"), (9, 5, "is below the expected one, 9")],
)
def test_no_choice_and_a_limit_below_the_mean_are_refused(mean, largest, message):
    with pytest.raises(validation.UsageError, match=message):
        selection.NumRuns(mean, largest)
