"""Two ways to one number: the recount's arithmetic and that of the accounting."""

import itertools
import math

import numpy as np
import pytest

from tff_dpftrl.accounting import gaussian, mixture_of_gaussians
from tff_dpftrl.auditing.recount import arithmetic
from tff_dpftrl.mechanisms import banded_toeplitz, blt, dense, restarts, table
from tff_dpftrl.participation import schema as schema_lib


@pytest.mark.parametrize("starts", [(0,), (0, 5, 17)])
@pytest.mark.parametrize("name", table.runnable())
def test_sensitivity_of_every_mechanism(name, starts):
    schema = schema_lib.MinSep(24, 5, 4)
    strategy = table.build(name, schema, table.DEFAULTS, starts=starts)
    parameters = strategy.to_dict()
    for cut in (24, 9, 1):
        known = strategy.sensitivity(schema_lib.MinSep(cut, 5, 4))
        found = arithmetic.squared_sensitivity(parameters, arithmetic.Schema(cut, 5, 4))
        assert known.exact
        assert found.lower == pytest.approx(known.squared, rel=1e-9)
        assert found.upper == pytest.approx(known.squared, rel=1e-9)
    ours, theirs = arithmetic.strategy_matrix(parameters, 24), strategy.strategy_matrix(24)
    np.testing.assert_allclose(ours.T @ ours, theirs.T @ theirs, atol=1e-9)


def _norms(matrix, schema):
    """‖C u‖² of every allowed pattern u, tried one by one."""
    for size in range(1, schema.times + 1):
        for turns in itertools.combinations(range(schema.rounds), size):
            if all(j - i >= schema.stride for i, j in itertools.pairwise(turns)):
                yield float(np.sum(np.square(matrix[:, turns].sum(axis=1))))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schema", [(11, 2, 3), (12, 1, 3), (9, 4, 2), (7, 9, 2)])
def test_search_and_bound_enclose_the_worst_pattern(seed, schema, monkeypatch):
    schema = arithmetic.Schema(*schema)
    rng = np.random.default_rng(seed)
    matrix = np.tril(rng.lognormal(size=(schema.rounds, schema.rounds)))
    parameters = dense.Dense(matrix).to_dict()
    worst = max(_norms(matrix, schema))
    tried = arithmetic.squared_sensitivity(parameters, schema)
    assert tried.lower == tried.upper == pytest.approx(worst)
    monkeypatch.setattr(arithmetic, "_MAX_PATTERNS", 0)
    found = arithmetic.squared_sensitivity(parameters, schema)
    assert found.how == "search, and a bound"
    assert 0.8 * worst <= found.lower <= worst * (1 + 1e-9)
    assert worst * (1 - 1e-9) <= found.upper <= 2.0 * worst


def test_contributions_of_opposite_directions_are_bounded():
    parameters = banded_toeplitz.BandedToeplitz((1.0, -0.5)).to_dict()
    found = arithmetic.squared_sensitivity(parameters, arithmetic.Schema(4, 1, 2))
    # Turns next to each other: 1.25 each, and ∓ 2 · 0.5 by their directions.
    assert found.lower == pytest.approx(2.5)  # A round apart.
    assert found.upper == pytest.approx(3.5)


def test_a_bound_too_dear_to_compute_is_infinite(monkeypatch):
    monkeypatch.setattr(arithmetic, "_MAX_PATTERNS", 0)
    monkeypatch.setattr(arithmetic, "_MAX_WORK", 10)
    parameters = table.build("tree", schema_lib.MinSep(8, 2, 2), table.DEFAULTS).to_dict()
    assert math.isinf(arithmetic.squared_sensitivity(parameters, arithmetic.Schema(8, 2, 2)).upper)


def test_noise_of_a_blt_is_its_inverse():
    strategy = restarts.whole_run(blt.Blt((0.9, 0.4), (0.3, 0.2)), 7, (0,))
    found = arithmetic.noise_matrix(strategy.to_dict(), 7)
    np.testing.assert_allclose(found, strategy.noise_matrix(7), atol=1e-12)


def test_an_unknown_mechanism_is_refused():
    with pytest.raises(ValueError, match="'magic' is not known to the recount"):
        arithmetic.strategy_matrix({"mechanism": "magic"}, 3)


@pytest.mark.parametrize("mu", [0.03, 0.4, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10, 1e-40])
def test_epsilon_of_a_gaussian(mu, delta):
    expected = gaussian.epsilon(mu, delta)
    assert arithmetic.gaussian_epsilon(mu, delta) == pytest.approx(expected, rel=1e-8, abs=1e-12)


def test_epsilon_without_noise_or_contribution():
    assert arithmetic.gaussian_epsilon(math.inf, 1e-6) == math.inf
    assert arithmetic.gaussian_epsilon(0.0, 1e-6) == 0.0
    assert arithmetic.sampled_epsilon(0.0, 0.1, 1, 10, 1e-6) == math.inf
    assert arithmetic.sampled_epsilon(1.0, 0.1, 1, 0, 1e-6) == 0.0


@pytest.mark.parametrize(
    "noise_multiplier, probability, group_size, num_steps, delta",
    [(4.0, 0.05, 1, 50, 1e-6), (4.0, 0.05, 3, 50, 1e-6), (20.0, 0.001, 1, 5000, 1e-6)],
)
def test_epsilon_of_secret_sampling(noise_multiplier, probability, group_size, num_steps, delta):
    found = arithmetic.sampled_epsilon(noise_multiplier, probability, group_size, num_steps, delta)
    pair = mixture_of_gaussians.els(noise_multiplier, probability, group_size)
    expected = mixture_of_gaussians.epsilon(pair, num_steps=num_steps, delta=delta)
    assert found == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize(
    "noise_multiplier, probability, group_size, num_steps, delta, largest_shift",
    [
        (0.7, 12 / 249, 16384, 2, 1 / 60, 100.0),
        (0.7, 0.03, 8192, 200, 1e-6, 100.0),
        (0.7, 0.05, 64, 2, 1e-2, 0.0),
        (2.0, 0.1, 8, 30, 1e-6, 0.0),
    ],
)
def test_bounds_of_large_epsilons_are_quick_and_around_them(
    noise_multiplier, probability, group_size, num_steps, delta, largest_shift, monkeypatch
):
    monkeypatch.setattr(arithmetic, "_LARGEST_SHIFT", largest_shift)
    monkeypatch.setattr(arithmetic, "sampled_epsilon", None)  # It would take gigabytes.
    pair = mixture_of_gaussians.els(noise_multiplier, probability, group_size)
    expected = mixture_of_gaussians.epsilon(pair, num_steps=num_steps, delta=delta)
    arguments = noise_multiplier, probability, group_size, num_steps, delta
    low, high = arithmetic.sampled_bounds(*arguments)
    assert low <= expected <= high
    if largest_shift:
        assert 5e3 < 0.5 * expected < low
    low, more = arithmetic.sampled_bounds(*arguments, 3.0)
    both = [(pair, num_steps), (mixture_of_gaussians.MixtureOfGaussians(1.0, (3.0,), (1.0,)), 1)]
    assert low <= mixture_of_gaussians.epsilon_of_runs(both, delta=delta) <= more
    assert more > high
