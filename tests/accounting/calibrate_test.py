"""Calibrated noise meets its target, and only just."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpftrl.accounting import calibrate, gaussian, guarantee, noise_search
from tff_dpftrl.mechanisms import identity, tree
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(200, 30, 5)


@given(
    target=st.floats(-3.0, 3.0).map(lambda exponent: 10.0**exponent),
    delta=st.floats(-30.0, -1.0).map(lambda exponent: 10.0**exponent),
    inflation=st.floats(1.0, 1.5),
)
@settings(max_examples=50, deadline=None)
def test_target_epsilon_is_met_and_not_wasted(target, delta, inflation):
    mechanism = tree.Tree(200)
    noise = calibrate.calibrate_noise_multiplier(
        mechanism, _SCHEMA, target_epsilon=target, delta=delta, clip_norm_inflation=inflation
    )
    claim = guarantee.dp_ftrl_guarantee(
        mechanism,
        noise_multiplier=noise,
        schema=_SCHEMA,
        delta=delta,
        clip_norm_inflation=inflation,
    )
    assert target * (1 - 1e-8) - 1e-9 * claim.mu <= claim.epsilon <= target


@given(target=st.floats(-6.0, 4.0).map(lambda exponent: 10.0**exponent))
@settings(max_examples=50, deadline=None)
def test_target_rho_is_met_and_not_wasted(target):
    mechanism = tree.Tree(200)
    noise = calibrate.calibrate_noise_multiplier(mechanism, _SCHEMA, target_rho=target)
    claim = guarantee.dp_ftrl_guarantee(
        mechanism, noise_multiplier=noise, schema=_SCHEMA, delta=1e-10
    )
    assert target * (1 - 1e-9) <= claim.rho_zcdp <= target


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({}, "exactly one"),
        ({"target_epsilon": 1.0, "target_rho": 1.0, "delta": 1e-6}, "exactly one"),
        ({"target_epsilon": 1.0}, "delta"),
        ({"target_epsilon": 0.0, "delta": 1e-6}, "target_epsilon"),
        ({"target_rho": math.inf}, "target_rho"),
        ({"target_epsilon": math.nan, "delta": 1e-6}, "target_epsilon"),
    ],
)
def test_errors_name_the_argument(kwargs, message):
    with pytest.raises(ValueError, match=message):
        calibrate.calibrate_noise_multiplier(tree.Tree(200), _SCHEMA, **kwargs)


@pytest.mark.parametrize("initial", [1e-3, 1.0, 1e3])
def test_search_ends_just_above_the_smallest_noise(initial):
    def epsilon(noise):
        return gaussian.epsilon(1.0 / noise, 1e-8)

    computed = noise_search.smallest_noise(epsilon, target_epsilon=2.0, initial=initial)
    assert epsilon(computed) <= 2.0
    smallest = 1.0 / gaussian.mu(2.0, 1e-8)
    assert smallest <= computed <= smallest * (1 + 1.01e-4)


@pytest.mark.parametrize("power", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-4, 1e-2])
def test_search_is_short_and_proves_its_answer(power, tolerance):
    asked = {}

    def epsilon(noise):
        asked[noise] = noise**-power * (1.0 + 1.0 / (1.0 + noise))
        return asked[noise]

    target = epsilon(0.7)
    computed = noise_search.smallest_noise(
        epsilon, target_epsilon=target, initial=0.72, relative_tolerance=tolerance
    )
    assert asked[computed] <= target  # It was evaluated.
    largest_too_small = max(noise for noise, cost in asked.items() if cost > target)
    assert largest_too_small < computed <= largest_too_small * (1 + tolerance)
    assert len(asked) <= 8  # Halving alone takes up to 17 from there.


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_search_copes_with_jumps_and_without_a_limit(scale):
    """Epsilon is infinite, then falls off a cliff, then is 0: no line fits that."""

    def epsilon(noise):
        return math.inf if noise < 0.5 * scale else 3.0 if noise < 0.9 * scale else 0.0

    computed = noise_search.smallest_noise(epsilon, target_epsilon=2.0)
    assert 0.9 * scale <= computed <= 0.9 * scale * (1 + 1e-4)


def test_search_gives_up_on_the_impossible():
    with pytest.raises(ValueError, match="out of reach"):
        noise_search.smallest_noise(lambda noise: 3.0, target_epsilon=2.0)


def test_a_target_beyond_any_noise_is_refused_in_one_line():
    kwargs = {"strategy": identity.Identity(), "schema": schema_lib.MinSep(1000, 1, 1000)}
    with pytest.raises(ValueError, match=r"target_epsilon=5e-324.* more noise than a float"):
        calibrate.calibrate_noise_multiplier(**kwargs, target_epsilon=5e-324, delta=1e-320)
    with pytest.raises(ValueError, match="more noise than a float"):
        calibrate.calibrate_noise_multiplier(**kwargs, target_rho=5e-324, clip_norm_inflation=1e300)


def test_the_largest_targets_end_the_search():
    kwargs = {"strategy": identity.Identity(), "schema": schema_lib.MinSep(10, 5, 2)}
    for target in ({"target_rho": 1.7e308}, {"target_epsilon": 1.7e308, "delta": 1e-6}):
        assert 0.0 < calibrate.calibrate_noise_multiplier(**kwargs, **target) < 1e-150
