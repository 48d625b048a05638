"""The synthetic task: exact steps, laws of the samples, and results known from elsewhere."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments import gaussian_means

_SMALL = gaussian_means.Task(
    epsilon=math.inf, compute_budget=8, num_users=8, examples_per_user=4, num_steps=3, dimension=5
)
_ONE_EXAMPLE = gaussian_means.Method("user", 1)


def test_full_batches_without_noise_are_gradient_descent():
    """All of 8 users with all of 4 examples: nothing is random but the data."""
    task = gaussian_means.Task(
        epsilon=math.inf,
        compute_budget=32,
        num_users=8,
        examples_per_user=4,
        num_steps=3,
        dimension=5,
        within_user=0.5,
    )
    rates, trials = (0.3, 2.0), 4
    settings = [(rate, clip_norm) for rate in rates for clip_norm in (2.0, 1e3)]
    for sampling in ("example", "user"):
        method = gaussian_means.Method(sampling, 4)
        assert method.noise_multiplier(task) == 0.0
        found = gaussian_means.simulate(task, method, 0.0, settings, num_trials=trials, seed=3)
        rng = np.random.default_rng([3, 0])
        mean = rng.standard_normal((trials, 5), np.float32)
        users = mean[:, None] + rng.standard_normal((trials, 8, 5), np.float32)
        data = users[:, :, None] + np.float32(0.5) * rng.standard_normal(
            (trials, 8, 4, 5), np.float32
        )
        for trial in range(trials):
            for column, (rate, clip_norm) in enumerate(settings):
                theta = np.zeros(5)
                for _ in range(3):
                    gradients = theta - data[trial].astype(np.float64)
                    if sampling == "user":  # Averages before it clips.
                        gradients = gradients.mean(axis=1)
                    gradients = gradients.reshape(-1, 5)
                    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
                    clipped = gradients * np.minimum(1.0, clip_norm / norms) / clip_norm
                    theta = theta - rate * clipped.mean(axis=0)
                expected = np.sum((theta - mean[trial]) ** 2)
                assert found[trial, column] == pytest.approx(expected, rel=1e-4)


def test_the_noise_is_that_of_the_average():
    """Huge noise is all that θ_T is made of."""
    task = gaussian_means.Task(num_steps=4, dimension=200, compute_budget=64)
    method = gaussian_means.Method("user", 2)
    losses = gaussian_means.simulate(task, method, 1e4, [(1.0, 1.0)], num_trials=32, seed=0)
    # Four draws with σ / M = 1e4 / 32 in 200 dimensions.
    expected = 4 * 200 * (1e4 / 32) ** 2
    assert losses.mean() == pytest.approx(expected, rel=5 * math.sqrt(2 / 6400))


def test_poisson_samples_have_their_law():
    rng = np.random.default_rng(0)
    units, there = gaussian_means.poisson_samples(rng, 4000, 50, 0.1)
    assert ((units < 50) == there).all()
    assert (np.diff(np.where(there, units, np.arange(1000, 1000 + units.shape[1]))) > 0).all()
    sizes = np.bincount(there.sum(axis=1), minlength=51)
    expected = stats.binom.pmf(np.arange(51), 50, 0.1) * 4000
    few = [*sizes[:12], sizes[12:].sum()], [*expected[:12], expected[12:].sum()]
    assert stats.chisquare(*few).pvalue > 1e-3
    counts = np.bincount(units[there], minlength=50)
    assert stats.chisquare(counts).pvalue > 1e-3
    # The first and the last unit come together as often as independent ones.
    together = ((units == 0) & there).any(axis=1) & ((units == 49) & there).any(axis=1)
    assert stats.binom.cdf(together.sum(), 4000, 0.01) > 1e-3
    assert stats.binom.sf(together.sum() - 1, 4000, 0.01) > 1e-3


def test_everybody_and_nearly_nobody_can_be_sampled():
    rng = np.random.default_rng(0)
    units, there = gaussian_means.poisson_samples(rng, 3, 7, 1.0)
    assert there.all() and (units == np.arange(7)).all()
    _, there = gaussian_means.poisson_samples(rng, 5, 7, 1e-12)
    assert not there.any()


def test_rows_of_a_user_are_distinct_and_equally_likely():
    chosen = gaussian_means._distinct(np.random.default_rng(0), (6000,), 5, 3)
    rows = np.sort(np.stack(chosen, axis=1), axis=1)
    assert (np.diff(rows, axis=1) > 0).all()
    _, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(counts) == 10 and stats.chisquare(counts).pvalue > 1e-3


def test_trials_are_a_function_of_the_seed():
    method = gaussian_means.Method("user", 2)
    kwargs = {"num_trials": 40, "seed": 5}
    first = gaussian_means.simulate(_SMALL, method, 1.0, [(0.1, 1.0)], **kwargs)
    again = gaussian_means.simulate(_SMALL, method, 1.0, [(0.1, 1.0)], **kwargs)
    np.testing.assert_array_equal(first, again)
    assert first.shape == (40, 1) and len(set(first[:, 0].tolist())) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs, method, expected",
    [
        ({}, ("example", 16), 1.08),
        ({}, ("user", 4), 0.84),
        ({"epsilon": 16.0}, ("user", 1), 0.152),
        ({"within_user": 8.0}, ("user", 16), 3.7),
    ],
)
def test_losses_are_those_of_another_implementation(kwargs, method, expected):
    found = gaussian_means.best(gaussian_means.Task(**kwargs), gaussian_means.Method(*method))
    assert found.loss == pytest.approx(expected, rel=0.1)
    assert found.standard_error < 0.03 * found.loss


def test_a_larger_group_pays_where_users_are_diverse_inside():
    """Figure 3 (c): σ₂ large."""
    task = gaussian_means.Task(within_user=8.0, num_steps=64)
    one, sixteen = (
        gaussian_means.best(task, gaussian_means.Method("user", g), num_trials=32) for g in (1, 16)
    )
    assert sixteen.loss + 3 * sixteen.standard_error < one.loss - 3 * one.standard_error


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gaussian_means.Task(num_users=0), "num_users must be at least 1, got 0"),
        (lambda: gaussian_means.Task(epsilon=0.0), "epsilon .* above 0, got 0.0"),
        (lambda: gaussian_means.Task(within_user=-1.0), "within_user .* got -1.0"),
        (lambda: gaussian_means.Method("x", 1).check(_SMALL), "sampling .* got 'x'"),
        (lambda: gaussian_means.Method("user", 5).check(_SMALL), "group_size=5 exceeds"),
        (lambda: gaussian_means.Method("user", 0).check(_SMALL), "group_size .* got 0"),
        (
            lambda: gaussian_means.Method("user", 1).check(gaussian_means.Task(compute_budget=512)),
            "compute_budget=512 asks for 512 of 256 users",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
