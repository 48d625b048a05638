"""The fast composition against integrals, brute force, dp_accounting and published numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft, signal, special, stats

from tff_dpftrl.accounting import gaussian, mixture_of_gaussians

_STEPS, _SAMPLING, _DELTA = 2000, 0.01, 1e-6
# Charles et al. 2024, Figure 1's setting, by dp_accounting's PLD with interval 1e-4.
_TABLE = {
    2.0: {1: 1.0350, 2: 2.2002, 4: 4.7684, 32: 66.834},
    1.0: {1: 2.9553, 2: 6.4326, 4: 14.535, 32: 259.14},
    0.5: {1: 20.621, 2: 42.137, 4: 90.531},
}

# Charles et al. 2024, section 4's setting: N = 256 users with K = 16 examples, B = 64, T = 256.
# (σ, (p or q, G), ε); own values, three digits and more.
_SIGMAS = {
    0.25: (61.766, 61.734, 30.932, 15.536, 7.850, 4.031),
    1.0: (17.040, 17.004, 8.583, 4.395, 2.339, 1.377),
    4.0: (4.957, 4.903, 2.578, 1.469, 0.976, 0.759),
    16.0: (1.748, 1.651, 1.008, 0.712, 0.559, 0.467),
}
_RATIOS = ((64 / 4096, 16), *((64 / group / 256, 1) for group in (1, 2, 4, 8, 16)))
_CALIBRATED = [
    (sigma, ratio, epsilon)
    for epsilon, row in _SIGMAS.items()
    for sigma, ratio in zip(row, _RATIOS, strict=True)
]


def _epsilon(stddev, group, steps=_STEPS, delta=_DELTA, sampling=_SAMPLING):
    return mixture_of_gaussians.epsilon(
        mixture_of_gaussians.els(stddev, sampling, group), num_steps=steps, delta=delta
    )


@pytest.mark.parametrize(
    "stddev, group", [(stddev, group) for stddev, row in _TABLE.items() for group in row]
)
def test_table_of_els(stddev, group):
    assert _epsilon(stddev, group) == pytest.approx(_TABLE[stddev][group], rel=5e-5)


def _brute_force_epsilon(stddev, group, interval, cell, low, high):
    """Composes losses rounded *down*, by a plain FFT: a lower bound of epsilon (removal)."""
    counts = np.arange(group + 1)
    weights = stats.binom.pmf(counts, group, _SAMPLING)
    counts, weights = counts[weights > 1e-18], weights[weights > 1e-18]
    x = np.arange(-9 * stddev, counts[-1] + 9 * stddev, cell)
    loss = special.logsumexp(
        np.log(weights)[:, None] + (counts[:, None] * x - counts[:, None] ** 2 / 2) / stddev**2,
        axis=0,
    )
    masses = sum(
        w * np.diff(special.ndtr((x - c) / stddev)) for c, w in zip(counts, weights, strict=True)
    )
    index = np.floor(loss[:-1] / interval).astype(int)
    size = fft.next_fast_len(int((high - low) / interval), real=True)
    single = np.bincount(index % size, weights=masses, minlength=size)
    composed = np.maximum(fft.irfft(fft.rfft(single) ** _STEPS, size), 0.0)
    first = int(low / interval)
    composed = np.roll(composed, -first % size)
    losses = (first + np.arange(size)) * interval
    bottom, top = 0.0, high
    while top - bottom > interval:
        middle = (bottom + top) / 2
        above = losses > middle
        if composed[above] @ -np.expm1(middle - losses[above]) > _DELTA:
            bottom = middle
        else:
            top = middle
    return bottom


def test_large_group_and_little_noise_against_brute_force():
    # dp_accounting gives 1372.95 here, after minutes: at losses above 745 its e^(−loss) is 0, and
    # it leaves out the subtracted term of delta. That is an upper bound too, but 1 too large.
    ours = _epsilon(0.5, 32)
    lower = _brute_force_epsilon(0.5, 32, interval=5e-4, cell=5e-5, low=-100.0, high=2200.0)
    # Rounding down costs at most 2000 · 5e-4 = 1 and on average half of it.
    assert lower <= ours <= lower * (1 + 1e-3)
    assert ours == pytest.approx(1372.95, rel=1e-3)


@pytest.mark.parametrize(
    "stddev, group, steps, delta",
    [
        pytest.param(1.0, 1, 100, 1e-6, marks=pytest.mark.slow),
        pytest.param(2.0, 8, 20, 1e-5, marks=pytest.mark.slow),
        (1.5, 2, 10, 1e-6),
    ],
)
def test_never_below_an_optimistic_and_close_to_a_pessimistic_estimate(stddev, group, steps, delta):
    ours = _epsilon(stddev, group, steps, delta)
    weights = list(stats.binom.pmf(np.arange(group + 1), group, _SAMPLING))

    def theirs(pessimistic):
        return (
            pld_lib.from_mixture_gaussian_mechanism(
                stddev,
                list(range(group + 1)),
                weights,
                pessimistic_estimate=pessimistic,
                value_discretization_interval=5e-3,
                use_connect_dots=pessimistic,
            )
            .self_compose(steps)
            .get_epsilon_for_delta(delta)
        )

    assert theirs(False) <= ours
    assert ours <= theirs(True) * (1 + 1e-4)


# Each of these takes seconds.
_LONG = ((0.3, 1e-4, 2.0, 1), (0.0, 0.5, 0.7, 4))


@pytest.mark.parametrize(
    "epsilon, sampling, stddev, group",
    [
        pytest.param(*one, marks=[pytest.mark.slow] if one in _LONG else [])
        for one in itertools.product((0.0, 0.3), (1e-4, 0.03, 0.5), (0.7, 2.0), (1, 4))
    ],
)
def test_one_step_is_the_hockey_stick_integral(group, stddev, sampling, epsilon):
    weights = stats.binom.pmf(np.arange(group + 1), group, sampling)
    x = np.linspace(-10 * stddev, group + 10 * stddev, 200_001)

    def density(mean):
        return np.exp(-(((x - mean) / stddev) ** 2) / 2) / (stddev * math.sqrt(2 * math.pi))

    base = density(0)
    mixed = sum(weight * density(count) for count, weight in enumerate(weights))

    def hockey_stick(upper, lower):
        return np.maximum(upper - math.exp(epsilon) * lower, 0.0).sum() * (x[1] - x[0])

    expected = max(hockey_stick(mixed, base), hockey_stick(base, mixed))
    computed = mixture_of_gaussians.delta(
        mixture_of_gaussians.els(stddev, sampling, group), num_steps=1, epsilon=epsilon
    )
    assert computed >= expected * (1 - 1e-6) - 1e-14
    assert computed <= expected * 1.01 + 1e-14
    if expected > 1e-7:
        back = _epsilon(stddev, group, 1, expected, sampling)
        assert epsilon - 1e-6 <= back <= epsilon * (1 + 1e-3) + 1e-5


@pytest.mark.parametrize("delta", [1e-200, 1e-60, 1e-10, 1e-2])
@pytest.mark.parametrize("stddev, steps", [(1.0, 1), (100.0, 1000), (20.0, 100_000)])
def test_without_sampling_it_is_the_plain_gaussian(stddev, steps, delta):
    exact = gaussian.epsilon(math.sqrt(steps) / stddev, delta)
    ours = mixture_of_gaussians.epsilon(
        mixture_of_gaussians.uls(stddev, 1.0), num_steps=steps, delta=delta
    )
    assert exact * (1 - 1e-9) <= ours <= exact * (1 + 1e-4) + 1e-7


@given(
    stddev=st.floats(0.6, 5.0),
    sampling=st.floats(1e-5, 0.9),
    group=st.integers(1, 6),
    steps=st.integers(1, 300),
    log_delta=st.floats(-10.0, -3.0),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_epsilon_is_monotone_in_every_parameter(stddev, sampling, group, steps, log_delta):
    delta = 10.0**log_delta
    base = _epsilon(stddev, group, steps, delta, sampling)
    slack = 2e-4 * base + 1e-6
    assert _epsilon(stddev * 1.1, group, steps, delta, sampling) <= base + slack
    assert _epsilon(stddev, group + 1, steps, delta, sampling) >= base - slack
    assert _epsilon(stddev, group, 2 * steps, delta, sampling) >= base - slack
    assert _epsilon(stddev, group, steps, 2 * delta, sampling) <= base + slack
    assert _epsilon(stddev, group, steps, delta, sampling * 1.1) >= base - slack


@pytest.mark.parametrize(
    "steps", [2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 4))]
)
def test_few_steps_against_direct_convolution(steps):
    # Few, rare samples: the Chernoff bound that the first look is based on is far off here.
    q, delta, interval = 1 / 256, 1e-8, 1e-4
    x = np.linspace(-9.0, 10.0, 200_001)
    loss = np.log1p(q * np.expm1(x - 0.5))
    # Differences of upper tails where those are small.
    survival = (1 - q) * special.ndtr(-x) + q * special.ndtr(1 - x)
    bounds = []
    for index in (np.floor(loss[:-1] / interval), np.ceil(loss[1:] / interval)):
        first = int(index.min())
        single = np.bincount(index.astype(int) - first, weights=-np.diff(survival))
        composed = single
        for _ in range(steps - 1):
            composed = np.maximum(signal.fftconvolve(composed, single), 0.0)
        losses = (np.arange(len(composed)) + steps * first) * interval
        candidates = np.arange(0.3, 0.5, 2e-4)
        above = np.searchsorted(losses, candidates, side="right")
        upper, lower = (np.cumsum(x[::-1])[::-1] for x in (composed, composed * np.exp(-losses)))
        deltas = upper[above] - np.exp(candidates) * lower[above]
        bounds.append(candidates[np.searchsorted(-deltas, -delta)])
    computed = mixture_of_gaussians.epsilon(
        mixture_of_gaussians.uls(1.0, q), num_steps=steps, delta=delta
    )
    assert bounds[0] - 2e-4 <= computed <= bounds[1] + 2e-4


def test_delta_and_epsilon_agree():
    mixture = mixture_of_gaussians.els(1.0, 0.01, 4)
    for delta in (1e-12, 1e-6, 1e-2):
        epsilon = mixture_of_gaussians.epsilon(mixture, num_steps=500, delta=delta)
        computed = mixture_of_gaussians.delta(mixture, num_steps=500, epsilon=epsilon)
        assert computed == pytest.approx(delta, rel=1e-3)


def test_calibration_meets_the_target():
    noise = mixture_of_gaussians.calibrate_els(
        sampling_probability=0.01, group_size=4, num_steps=200, target_epsilon=2.0, delta=1e-6
    )
    assert 2.0 * (1 - 1e-3) <= _epsilon(noise, 4, 200) <= 2.0


# By default the corners of the table.
_CORNERS = [(sigma, r, e) for sigma, r, e in _CALIBRATED if r in _RATIOS[::5] and e in (0.25, 16.0)]


@pytest.mark.parametrize(
    "sigma, ratio, epsilon",
    [pytest.param(*o, marks=[] if o in _CORNERS else [pytest.mark.slow]) for o in _CALIBRATED],
)
def test_calibration_of_table(sigma, ratio, epsilon):
    sampling, group = ratio
    computed = mixture_of_gaussians.calibrate_els(
        sampling_probability=sampling,
        group_size=group,
        num_steps=256,
        target_epsilon=epsilon,
        delta=1e-6,
    )
    # Half of the last digit, and what a search may lie above the smallest noise.
    assert computed == pytest.approx(sigma, abs=5e-4 + 1e-4 * sigma)


def test_calibration_evaluates_little_and_remembers(monkeypatch):
    asked = []
    evaluate = mixture_of_gaussians.epsilon

    def count(pair, **kwargs):
        asked.append((pair.stddev, evaluate(pair, **kwargs)))
        return asked[-1][1]

    monkeypatch.setattr(mixture_of_gaussians, "epsilon", count)
    kwargs = {"sampling_probability": 0.0123, "num_steps": 300, "delta": 1e-7}
    noise = mixture_of_gaussians.calibrate_els(**kwargs, group_size=3, target_epsilon=3.0)
    assert dict(asked)[noise] <= 3.0
    too_little = max(stddev for stddev, cost in asked if cost > 3.0)
    assert too_little < noise <= too_little * (1 + 1e-4)
    assert len(asked) <= 6  # Bisection took 15.
    asked.clear()
    assert mixture_of_gaussians.calibrate_els(**kwargs, group_size=3, target_epsilon=3.0) == noise
    assert not asked


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"target_epsilon": 0.0}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"group_size": 0}, "group_size"),
        ({"sampling_probability": 1.5}, "sampling_probability"),
        ({"num_steps": 0}, "num_steps"),
    ],
)
def test_calibration_names_what_is_wrong(wrong, name):
    kwargs = {
        "sampling_probability": 0.1,
        "group_size": 1,
        "num_steps": 10,
        "target_epsilon": 1.0,
        "delta": 1e-6,
    }
    with pytest.raises(ValueError, match=name):
        mixture_of_gaussians.calibrate_els(**kwargs | wrong)


def test_addition_is_not_looked_at_closely_where_removal_costs_more():
    kwargs = [(mixture_of_gaussians.uls(0.6, 0.004), 500)], 1e-6
    removal = mixture_of_gaussians._one_sided_epsilon(*kwargs, True)
    addition = mixture_of_gaussians._one_sided_epsilon(*kwargs, False)
    quick = mixture_of_gaussians._one_sided_epsilon(*kwargs, False, at_least=removal)
    assert addition <= quick <= removal
    # Where it matters it is as precise as ever.
    less = 0.9 * addition
    same = mixture_of_gaussians._one_sided_epsilon(*kwargs, False, at_least=less)
    assert same == addition


def test_delta_of_addition_is_composed_only_where_it_may_be_above_that_of_removal(monkeypatch):
    runs, composed = ((mixture_of_gaussians.uls(1.3, 0.31), 3),), []
    compose = mixture_of_gaussians._composed

    def noting(runs, tail, remove, *args):
        composed.append(remove)
        return compose(runs, tail, remove, *args)

    monkeypatch.setattr(mixture_of_gaussians, "_composed", noting)
    mixture_of_gaussians._delta.cache_clear()
    for _ in range(2):  # The second time it is remembered.
        found = mixture_of_gaussians.delta_of_runs(runs, epsilon=0.9)
        assert composed == [True]
    assert mixture_of_gaussians._one_sided_delta(runs, 1e-50, False, 0.9, 0.0) <= found
    # At 0 both are the same.
    removal = mixture_of_gaussians._one_sided_delta(runs, 1e-50, True, 0.0, 0.0)
    assert mixture_of_gaussians.delta_of_runs(runs, epsilon=0.0) == pytest.approx(removal, rel=1e-6)


def _substitution(stddev, sampling, group):
    pair = mixture_of_gaussians.els(stddev, sampling, group)
    return dataclasses.replace(pair, is_substitution=True)


@pytest.mark.parametrize("group, stddev", [(1, 0.7), (4, 2.0)])
@pytest.mark.parametrize(
    "epsilon, sampling",
    [
        *itertools.product((0.0, 0.3), (1e-4, 0.03)),
        pytest.param(0.0, 1.0, marks=pytest.mark.slow),
        (0.3, 1.0),
    ],
)
def test_one_step_of_a_substitution_is_the_hockey_stick_integral(group, stddev, sampling, epsilon):
    weights = stats.binom.pmf(np.arange(group + 1), group, sampling)
    x = np.linspace(-group - 10 * stddev, group + 10 * stddev, 200_001)
    upper = sum(w * stats.norm.pdf(x, j, stddev) for j, w in enumerate(weights))
    expected = np.maximum(upper - math.exp(epsilon) * upper[::-1], 0.0).sum() * (x[1] - x[0])
    pair = _substitution(stddev, sampling, group)
    computed = mixture_of_gaussians.delta(pair, num_steps=1, epsilon=epsilon)
    assert expected * (1 - 1e-6) - 1e-14 <= computed <= expected * 1.01 + 1e-14
    if 1e-7 < expected < 0.9:
        back = mixture_of_gaussians.epsilon(pair, num_steps=1, delta=expected)
        assert epsilon - 1e-6 <= back <= epsilon * (1 + 1e-3) + 1e-5


def _of_two_dimensions(means, weights, others, epsilon):
    """Integrates the hockey-stick divergence of two mixtures in the plane, with stddev 1."""
    x = np.linspace(-9.0, 9.0, 701)
    density = np.stack([stats.norm.pdf(x[:, None], mean[0]) for mean in (*means, *others)])
    second = np.stack([stats.norm.pdf(x[:, None], mean[1]) for mean in (*means, *others)])
    each = density * second.swapaxes(1, 2)
    upper = np.tensordot(weights, each[: len(weights)], 1)
    lower = np.tensordot(weights, each[len(weights) :], 1)
    return np.maximum(upper - math.exp(epsilon) * lower, 0.0).sum() * (x[1] - x[0]) ** 2


@pytest.mark.parametrize("seed", range(4))
def test_no_other_vectors_of_a_user_are_worse_than_opposite_ones(seed):
    """Two examples of a user, and others in their place, of norm 1 at most in any directions."""
    random = np.random.default_rng(seed)
    scale, sampling = random.uniform(0.3, 2.0), random.choice([0.1, 0.5, 1.0])
    vectors = random.normal(size=(2, 2, 2))
    norms = random.uniform(0.0, 1.0, size=(2, 2, 1)) ** 0.3
    vectors *= scale * norms / np.linalg.norm(vectors, axis=-1, keepdims=True)
    subsets = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])
    weights = np.prod(np.where(subsets, sampling, 1 - sampling), axis=1)
    pair = _substitution(1 / scale, sampling, 2)
    for epsilon in (0.0, 0.5, 2.0):
        worst = mixture_of_gaussians.delta(pair, num_steps=1, epsilon=epsilon)
        here = _of_two_dimensions(subsets @ vectors[0], weights, subsets @ vectors[1], epsilon)
        assert here <= worst * (1 + 1e-6)
    # The opposite ones reach it.
    opposite = subsets @ np.array([[scale, 0.0], [scale, 0.0]])
    reached = _of_two_dimensions(opposite, weights, -opposite, 0.5)
    worst = mixture_of_gaussians.delta(pair, num_steps=1, epsilon=0.5)
    assert reached == pytest.approx(worst, rel=1e-3)


def test_two_steps_of_substitutions_are_an_integral_over_the_plane():
    q, scale = 0.3, 0.8
    first, second = np.array([(0, 0), (1, 0)]), np.array([(0, 0), (0, 1)])
    means = scale * (first[:, None] + second[None, :]).reshape(4, 2)
    weights = np.array([(1 - q) ** 2, (1 - q) * q, q * (1 - q), q * q])
    pair = _substitution(1 / scale, q, 1)
    for epsilon in (0.1, 1.0):
        expected = _of_two_dimensions(means, weights, -means, epsilon)
        computed = mixture_of_gaussians.delta(pair, num_steps=2, epsilon=epsilon)
        assert expected * (1 - 1e-6) <= computed <= expected * 1.001
        back = mixture_of_gaussians.epsilon(pair, num_steps=2, delta=expected)
        assert epsilon * (1 - 1e-5) <= back <= epsilon * 1.001 + 1e-5


def test_a_substitution_without_sampling_has_twice_the_sensitivity():
    exact = gaussian.epsilon(2 * math.sqrt(50) / 10.0, 1e-6)
    ours = mixture_of_gaussians.epsilon(_substitution(10.0, 1.0, 1), num_steps=50, delta=1e-6)
    assert exact * (1 - 1e-9) <= ours <= exact * (1 + 1e-4)
    with pytest.raises(ValueError, match="substitution"):
        _substitution(10.0, 1.0, 1).to_dp_event(1)


def test_different_runs_compose_in_any_order():
    """`composition_test` compares such runs with dp_accounting."""
    first, second = mixture_of_gaussians.uls(2.0, 0.05), mixture_of_gaussians.els(2.5, 0.01, 2)
    both = mixture_of_gaussians.epsilon_of_runs([(first, 100), (second, 50)], delta=1e-5)
    other = mixture_of_gaussians.epsilon_of_runs([(second, 50), (first, 100)], delta=1e-5)
    assert both == pytest.approx(other)
    one = mixture_of_gaussians.epsilon(first, num_steps=100, delta=1e-5)
    assert one < both
    # One run cut in two is the same run.
    halves = mixture_of_gaussians.epsilon_of_runs([(first, 30), (first, 70)], delta=1e-5)
    assert halves == pytest.approx(one, rel=1e-4)


def test_gaussian_mechanisms_compose_to_one():
    runs = [(mixture_of_gaussians.MixtureOfGaussians(1.0, (mu,), (1.0,)), 1) for mu in (0.4, 0.9)]
    exact = gaussian.epsilon(math.hypot(0.4, 0.9), 1e-6)
    ours = mixture_of_gaussians.epsilon_of_runs(runs, delta=1e-6)
    assert exact * (1 - 1e-9) <= ours <= exact * (1 + 1e-4)


def test_accountant_accepts_the_event():
    mixture = mixture_of_gaussians.els(2.0, 0.05, 2)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(mixture.to_dp_event(10))
    ours = mixture_of_gaussians.epsilon(mixture, num_steps=10, delta=1e-6)
    assert accountant.get_epsilon(1e-6) == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: mixture_of_gaussians.els(0.0, 0.1, 1), "stddev"),
        (lambda: mixture_of_gaussians.els(1.0, 0.0, 1), "sampling_probability"),
        (lambda: mixture_of_gaussians.els(1.0, 1.1, 1), "sampling_probability"),
        (lambda: mixture_of_gaussians.els(1.0, 0.1, 0), "group_size"),
        (lambda: mixture_of_gaussians.els(1.0, 0.1, 1.5), "group_size"),
        (lambda: mixture_of_gaussians.MixtureOfGaussians(1.0, (0.0, 1.0), (0.5, 0.4)), "sum to 1"),
        (lambda: mixture_of_gaussians.MixtureOfGaussians(1.0, (1.0, 0.0), (0.5, 0.5)), "increas"),
        (lambda: mixture_of_gaussians.MixtureOfGaussians(1.0, (1.0,), (0.5, 0.5)), "length"),
        (lambda: _epsilon(1.0, 1, delta=0.0), "delta"),
        (lambda: _epsilon(1.0, 1, steps=0), "num_steps"),
        (
            lambda: mixture_of_gaussians.delta(
                mixture_of_gaussians.uls(1.0, 0.1), num_steps=1, epsilon=-1.0
            ),
            "epsilon",
        ),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()


def test_missing_probability_is_charged_in_full():
    # A billionth of the mass was tolerated, ten times delta: it may lie where it hurts most.
    short = mixture_of_gaussians.MixtureOfGaussians(1.0, (0.0, 1.0, 20.0), (0.9, 0.1 - 1e-9, 0.0))
    whole = mixture_of_gaussians.MixtureOfGaussians(1.0, (0.0, 1.0, 20.0), (0.9, 0.1 - 1e-9, 1e-9))
    assert sum(short.probabilities) == pytest.approx(1.0, abs=1e-15)
    kwargs = {"num_steps": 1, "delta": 1e-10}
    charged = mixture_of_gaussians.epsilon(short, **kwargs)
    assert charged == pytest.approx(mixture_of_gaussians.epsilon(whole, **kwargs), rel=1e-6)
    # The worst case is with that mass at 20: far above what the rest alone costs.
    rest = mixture_of_gaussians.MixtureOfGaussians(1.0, (0.0, 1.0), (0.9, 0.1))
    assert charged > 10 * mixture_of_gaussians.epsilon(rest, **kwargs)


def test_rounding_of_binomials_is_not_taken_for_missing_mass():
    for size, probability in ((1000, 0.01), (100_000, 0.3)):
        pair = mixture_of_gaussians.els(1.0, probability, size)
        assert pair.probabilities[-1] < 1e-200


def test_probabilities_that_are_far_from_one_are_refused():
    with pytest.raises(ValueError, match="sum to 1"):
        mixture_of_gaussians.MixtureOfGaussians(1.0, (0.0, 1.0), (0.9, 0.1 - 1e-8))
    with pytest.raises(ValueError, match="sum to 1"):
        mixture_of_gaussians.MixtureOfGaussians(1.0, (0.0, 1.0), (0.9, math.nan))


@pytest.mark.parametrize("noise", [5e-324, 1e-200, 1e-100, 1e-6, 1e-3])
@pytest.mark.filterwarnings("error")
def test_any_noise_gives_an_epsilon_that_covers_the_whole_delta(noise):
    pair = mixture_of_gaussians.uls(noise, 0.01)
    computed = mixture_of_gaussians.epsilon(pair, num_steps=100, delta=1e-6)
    # At least 5 of the 100 steps concern the user with probability .003, far above delta.
    assert computed >= 5 / (2 * noise * noise) if noise > 1e-150 else computed == math.inf
    assert mixture_of_gaussians.delta(pair, num_steps=100, epsilon=1.0) == 1.0
    # And it is at most that of all steps, without sampling.
    assert computed <= gaussian.epsilon(10.0 / noise if noise > 1e-300 else math.inf, 1e-6)


def test_counting_and_losses_agree_where_both_can_be_used():
    pair = mixture_of_gaussians.uls(0.02, 0.01)
    tight = mixture_of_gaussians.epsilon(pair, num_steps=20, delta=1e-6)
    loose = mixture_of_gaussians._epsilon_by_counting([(pair, 20)], 1e-6)
    assert tight <= loose < 1.5 * tight


@pytest.mark.filterwarnings("error")
def test_delta_at_any_epsilon_is_tiny_not_one():
    pair = mixture_of_gaussians.uls(1.0, 0.01)
    assert mixture_of_gaussians.delta(pair, num_steps=10, epsilon=1e300) == 1e-50


# Charles et al. 2024, Conjecture 1, at T = 1000, K = 32, δ = 1e-6: σ_ELS / (K σ_ULS) by (ε, p);
# own values.
_CONJECTURE = {
    (1.0, 0.01): 0.856,
    (1.0, 0.1): 0.995,
    (4.0, 0.01): 0.488,
    (4.0, 0.1): 0.971,
    (16.0, 0.01): 0.244,
    (16.0, 0.1): 0.854,
}


@pytest.mark.slow
@pytest.mark.parametrize("target, sampling", _CONJECTURE)
def test_noise_of_a_group_of_examples_beside_that_of_its_user(target, sampling):
    els, uls = (
        mixture_of_gaussians.calibrate_els(
            sampling_probability=sampling,
            group_size=group,
            num_steps=1000,
            target_epsilon=target,
            delta=1e-6,
        )
        for group in (32, 1)
    )
    # Both are 1e-4 off at most, and the table half a unit of its last place.
    assert els / (32 * uls) == pytest.approx(_CONJECTURE[target, sampling], rel=2e-4, abs=5e-4)


@pytest.mark.parametrize("stddev, sampling", [(0.7, 0.01), (0.7, 0.3), (2.0, 0.1), (8.0, 0.3)])
@pytest.mark.parametrize("steps, log_delta", [(1, -3), (1000, -8)])
@pytest.mark.parametrize("group", [2, 9])
def test_a_group_of_examples_is_no_worse_than_its_user(stddev, sampling, steps, log_delta, group):
    # Conjecture 1: K σ is enough noise for K examples of a user, where σ is for one of the user's
    # gradients; ε falls with σ, so that this is σ_ELS ≤ K σ_ULS. Both ε are upper bounds, off by
    # a relative 1e-4, or 1e-7, at most.
    els = _epsilon(group * stddev, group, steps, 10.0**log_delta, sampling)
    uls = _epsilon(stddev, 1, steps, 10.0**log_delta, sampling)
    assert els <= uls * (1 + 1e-4) + 1e-7


def _log_moment(order, group, sampling, stddev):
    """Log E_Q[(P / Q)^α] of the mixture P = N(Binomial(K, p), (Kσ)²), and Q = N(0, (Kσ)²).

    It is that of Σ over counts j of α independent draws, of their chance times
    exp((S² − Σ j²) / (2 (Kσ)²)), S being their sum: an α-fold convolution of terms above 0.
    """
    counts = np.arange(group + 1) / (group * stddev)
    term = stats.binom.logpmf(np.arange(group + 1), group, sampling) - counts**2 / 2.0
    total = np.zeros(1)
    for _ in range(order):
        padded = np.pad(total, group, constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, group + 1)
        total = special.logsumexp(windows + term[::-1], axis=1)
    sums = np.arange(order * group + 1) / (group * stddev)
    return float(special.logsumexp(total + sums**2 / 2.0))


@pytest.mark.parametrize("order, group, stddev", [(2, 1, 0.5), (5, 3, 1.0), (8, 4, 3.0)])
def test_moments_are_those_of_an_integral(order, group, stddev):
    pair = mixture_of_gaussians.els(group * stddev, 0.2, group)
    shifts = np.asarray(pair.sensitivities) / pair.stddev
    x, step = np.linspace(-12.0, 12.0 + order * shifts[-1], 20_001, retstep=True)
    ratio = special.logsumexp(
        np.log(pair.probabilities) + np.outer(x, shifts) - shifts**2 / 2.0, axis=1
    )
    # The trapezoidal rule is exact to rounding for densities of this kind.
    integral = special.logsumexp(order * ratio + stats.norm.logpdf(x)) + math.log(step)
    assert _log_moment(order, group, 0.2, stddev) == pytest.approx(integral, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("stddev", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("sampling", [1e-3, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("order", [2, 3, 8, 32])
def test_renyi_divergence_of_a_group_is_at_most_that_of_its_user(stddev, sampling, order):
    # Lemma 1. A sum of n terms has a relative rounding error of some n ε of its largest logarithm.
    of_user = _log_moment(order, 1, sampling, stddev)
    binomial = [
        math.log(math.comb(order, k))
        + k * math.log(sampling)
        + (order - k) * math.log1p(-sampling)
        + k * (k - 1) / (2 * stddev**2)
        for k in range(order + 1)
    ]
    margin = 1e-12 * (1.0 + order**2 / stddev**2)
    assert abs(of_user - special.logsumexp(binomial)) <= margin
    for group in (2, 5, 16):
        assert _log_moment(order, group, sampling, stddev) <= of_user + margin


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))


def test_a_large_group_is_accounted_for_in_parts_with_the_same_result(monkeypatch):
    mixture = mixture_of_gaussians.els(20.0, 0.02, 300)
    expected = mixture_of_gaussians.delta(mixture, num_steps=6, epsilon=1.0)
    parts = []

    def noting(edges):
        if edges.ndim == 2:  # One row for each component of the mixture.
            parts.append(edges.size)
        return masses(edges)

    masses = mixture_of_gaussians._log_cell_masses
    monkeypatch.setattr(mixture_of_gaussians, "_log_cell_masses", noting)
    monkeypatch.setattr(mixture_of_gaussians, "_BLOCK", 20_000)
    mixture_of_gaussians._delta.cache_clear()
    assert mixture_of_gaussians.delta(mixture, num_steps=6, epsilon=1.0) == expected
    assert len(parts) > 10 and max(parts) <= 20_000 + 301
