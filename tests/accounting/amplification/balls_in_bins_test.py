"""Balls in bins: bounds against one Gaussian, integrals and simulated privacy losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.accounting import gaussian, guarantee
from tff_dpftrl.accounting.amplification import balls_in_bins, patterns
from tff_dpftrl.mechanisms import (
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

BLT = blt.Blt((0.95, 0.5), (0.2, 0.3))


def run_of(strategy, noise, num_rounds, num_bins):
    return balls_in_bins.BallsInBins.from_strategy(
        strategy, noise_multiplier=noise, num_rounds=num_rounds, num_bins=num_bins
    )


def sums_of_columns(strategy, num_rounds, num_bins):
    """Returns the m_j, shape [rows, num_bins], by the definition."""
    matrix = strategy.strategy_matrix(num_rounds)
    taking_part = np.arange(num_rounds)[:, None] % num_bins == np.arange(num_bins)
    return matrix @ taking_part


@pytest.mark.parametrize(
    "strategy", [BLT, banded_toeplitz.BandedToeplitz.fhu(3), tree.Tree(20)], ids=lambda s: s.name
)
def test_the_kernel_bounds_all_inner_products(strategy):
    sums = sums_of_columns(strategy, 20, 6)
    gram = sums.T @ sums
    kernel = patterns.bin_kernel(strategy, 20, 6)
    lag = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    distance = np.minimum(lag, 6 - lag)
    assert (gram <= kernel[distance]).all()
    assert kernel[0] == pytest.approx(np.diag(gram).max())
    assert kernel[-1] == pytest.approx(gram[distance == 3].max())


def test_a_dense_strategy_has_the_kernel_of_its_matrix():
    as_matrix = dense.Dense(BLT.strategy_matrix(30))
    assert patterns.bin_kernel(as_matrix, 30, 7) == pytest.approx(patterns.bin_kernel(BLT, 30, 7))


def deltas_of_two_bins(variance, epsilon):
    """Integrates both directions for two bins with orthogonal means, C = I."""
    shift = math.sqrt(variance)

    # The ratio is smooth but for a kink, so a fine midpoint rule on a square does well enough.
    points = np.linspace(-9.0, 9.0 + shift, 1501)
    width = points[1] - points[0]
    middle = (points[1:] + points[:-1]) / 2
    weights = stats.norm.pdf(middle) * width
    factor = np.exp(shift * middle - variance / 2)
    ratios = (factor[:, None] + factor[None, :]) / 2
    remove = weights @ np.maximum(ratios - math.exp(epsilon), 0.0) @ weights
    add = weights @ np.maximum(1.0 - math.exp(epsilon) * ratios, 0.0) @ weights
    return max(remove, add)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_two_bins_by_integration(noise):
    run = run_of(identity.Identity(), noise, 2, 2)
    for epsilon in (0.1, 0.5 / noise, 2.0 / noise):
        exact = deltas_of_two_bins(noise**-2, epsilon)
        assert exact * (1 - 1e-4) <= run.delta(epsilon) <= exact * 1.005 + 1e-12


def simulated_deltas(gram, epsilon, rng, num_samples=100_000):
    """Returns the means and standard errors of δ(ε) of removing and of adding a unit."""
    half = np.diag(gram) / 2
    root = np.linalg.cholesky(gram + 1e-9 * np.eye(len(gram)))
    noise = rng.standard_normal((num_samples, len(gram))) @ root.T
    bins = rng.integers(len(gram), size=num_samples)
    with_unit = np.log(np.mean(np.exp(noise + gram[bins] - half), axis=1))
    without = np.log(np.mean(np.exp(noise - half), axis=1))
    excess = (
        np.maximum(-np.expm1(epsilon - with_unit), 0),
        np.maximum(-np.expm1(epsilon + without), 0),
    )
    return [(e.mean(), e.std() / math.sqrt(num_samples)) for e in excess]


def check_against_simulation(seed):
    """Draws a setting; its simulated δ must not be above the bound by chance's measure."""
    rng = np.random.default_rng(seed)
    num_bins = int(rng.integers(2, 12))
    num_rounds = int(rng.integers(num_bins, 60))
    strategy = [
        identity.Identity(),
        BLT,
        banded_toeplitz.BandedToeplitz.fhu(int(rng.integers(1, 9))),
        inverse_banded.InverseBanded.bisr(4),
    ][rng.integers(4)]
    sums = sums_of_columns(strategy, num_rounds, num_bins)
    # Epsilons from small to large, at deltas that a hundred thousand draws can tell.
    noise = np.linalg.norm(sums, axis=0).max() / gaussian.mu(rng.uniform(0.1, 8.0), 1e-3)
    run = run_of(strategy, noise, num_rounds, num_bins)
    epsilon = run.epsilon(1e-3)
    gram = sums.T @ sums / noise**2
    for mean, error in simulated_deltas(gram, epsilon, rng):
        assert mean - 5 * error <= 1e-3, (strategy, num_rounds, num_bins, noise)
    # Between its bounds: no tighter than the exact delta of a nearby, smaller epsilon.
    assert epsilon <= run.unamplified_epsilon(1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_simulated_losses_stay_below_the_bound(seed):
    check_against_simulation(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 204))
def test_simulated_losses_stay_below_the_bound_in_many_settings(seed):
    check_against_simulation(seed)


def test_the_bound_of_orthogonal_bins_is_tight():
    # Simulated δ of the bound's ε is the δ that it was computed for.
    rng = np.random.default_rng(5)
    epsilon = run_of(identity.Identity(), 1.0, 40, 20).epsilon(1e-2)
    (mean, error), _ = simulated_deltas(2.0 * np.eye(20), epsilon, rng, 400_000)
    assert abs(mean - 1e-2) <= 5 * error + 1e-4


@pytest.mark.parametrize("strategy", [BLT, banded_toeplitz.BandedToeplitz.fhu(4)])
def test_it_is_never_above_the_guarantee_of_the_schema(strategy):
    schema = schema_lib.MinSep.as_many_as_fit(40, 5)
    for noise in (0.05, 1.0, 10.0):
        plain = guarantee.dp_ftrl_guarantee(
            strategy, noise_multiplier=noise, schema=schema, delta=1e-6
        )
        assert run_of(strategy, noise, 40, 5).epsilon(1e-6) <= plain.epsilon * (1 + 1e-9)


def test_less_noise_or_fewer_bins_cost_more():
    by_noise = [run_of(BLT, noise, 60, 4).epsilon(1e-5) for noise in (1.0, 4.0)]
    by_bins = [run_of(identity.Identity(), 2.0, 60, bins).epsilon(1e-5) for bins in (2, 6, 20)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_bins == sorted(by_bins, reverse=True)


def test_delta_of_epsilon_is_delta():
    run = run_of(BLT, 5.0, 60, 3)
    assert run.delta(run.epsilon(1e-7)) == pytest.approx(1e-7, rel=0.01)


@pytest.mark.parametrize("delta", [1e-2, 1e-8])
def test_the_estimate_of_one_gaussian_contains_its_epsilon(delta):
    estimate = run_of(identity.Identity(), 1.0, 4, 1).estimate(delta, 40_000, 0)
    assert estimate.low <= gaussian.epsilon(2.0, delta) <= estimate.high
    assert estimate.high - estimate.low < 0.1 * estimate.epsilon


def test_the_estimate_stays_below_the_bound():
    run = run_of(BLT, 3.0, 40, 5)
    estimate = run.estimate(1e-4, 40_000, 0)
    assert estimate.low <= run.epsilon(1e-4) <= 1.1 * estimate.high


def test_calibration_meets_the_target():
    target = {"num_rounds": 40, "num_bins": 4}
    noise = balls_in_bins.calibrate_noise_multiplier(BLT, target_epsilon=3.0, delta=1e-6, **target)
    assert 3.0 * (1 - 0.005) <= run_of(BLT, noise, 40, 4).epsilon(1e-6) <= 3.0


@pytest.mark.parametrize(
    ("noise", "delta"),
    [(0.0501, 1e-10), (0.055, 1e-15), (0.08, 1e-60), (0.1, 1e-100), (1.0, 1e-60)],
)
def test_huge_losses_are_not_lost(noise, delta):
    # One of orthogonal bins is at least a tenth of the mean of ten: dP/dQ >= dP_j/dQ / 10.
    run = balls_in_bins.BallsInBins.from_strategy(
        identity.Identity(), noise_multiplier=noise, num_rounds=10, num_bins=10
    )
    least = gaussian.epsilon(1.0 / noise, 10.0 * delta) - math.log(10.0)
    assert run.epsilon(delta) >= least
    assert run.delta(least) >= min(delta, 1e-30)
    assert run.delta(1000.0) >= 1e-30


def test_one_bin_is_one_gaussian():
    run = run_of(identity.Identity(), 2.0, 9, 1)
    assert run.epsilon(1e-6) == pytest.approx(gaussian.epsilon(1.5, 1e-6), rel=1e-9)


def test_no_noise_is_no_privacy():
    assert run_of(BLT, 0.0, 20, 4).epsilon(1e-6) == math.inf


@pytest.mark.parametrize("bins", [0, 21, 2.5])
def test_wrong_numbers_of_bins_are_refused(bins):
    with pytest.raises(ValueError, match="num_bins"):
        run_of(BLT, 1.0, 20, bins)


def test_negative_entries_are_refused():
    with pytest.raises(ValueError, match="without negative entries"):
        run_of(banded_toeplitz.BandedToeplitz((1.0, -0.5)), 1.0, 20, 4)
