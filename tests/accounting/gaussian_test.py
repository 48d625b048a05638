"""The exact Gaussian against 400-digit arithmetic, dp_accounting and published numbers."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpftrl.accounting import gaussian

_DELTAS = (1e-300, 1e-100, 1e-10, 1e-5, 0.1, 0.9)
_mus = st.floats(-12.0, 4.0).map(lambda exponent: 10.0**exponent)
_deltas = st.floats(-300.0, -0.01).map(lambda exponent: 10.0**exponent)


def _log_delta(mu: float, epsilon: float) -> float:
    """Balle & Wang 2018, Theorem 8, in 400 digits."""
    with mpmath.workdps(400):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        upper = mpmath.ncdf(mu / 2 - epsilon / mu)
        return float(mpmath.log(upper - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)))


@pytest.mark.parametrize("mu", [1e-12, 1e-8, 1e-4, 0.01, 0.3, 0.7, 0.71, 1.0, 3.0, 10.0, 40.0])
@pytest.mark.parametrize("s", [-7.0, -3.0, -0.1, 0.5, 2.0, 6.0, 20.0, 36.0])
def test_log_delta_agrees_with_high_precision(mu, s):
    epsilon = mu * (max(s, -mu / 2) + mu / 2)
    expected = _log_delta(mu, epsilon)
    # 1e-11 of the argument's own rounding is amplified by at most |d log delta / d s| <= s + 1.
    assert gaussian.log_delta(mu, epsilon) == pytest.approx(expected, rel=1e-11, abs=1e-11)


@given(mu=_mus, delta=_deltas)
@settings(max_examples=60, deadline=None)
def test_epsilon_is_smallest_that_keeps_delta(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    assert gaussian.log_delta(mu, epsilon) <= math.log(delta)
    if epsilon > 0.0:
        less = epsilon - (1e-9 * epsilon + 1e-9 * mu)
        assert less < 0.0 or gaussian.log_delta(mu, less) > math.log(delta)


@given(mu=_mus, delta=_deltas)
@settings(max_examples=60, deadline=None)
def test_mu_inverts_epsilon_on_the_safe_side(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    computed = gaussian.mu(epsilon, delta)
    assert gaussian.log_delta(computed, epsilon) <= math.log(delta)
    if epsilon > 0.0:
        assert computed == pytest.approx(mu, rel=1e-9)


@pytest.mark.parametrize(
    "mu", [0.05, 0.5, 1.0, *(pytest.param(mu, marks=pytest.mark.slow) for mu in (2.0, 5.0))]
)
@pytest.mark.parametrize("delta", [1e-10, 1e-6, 1e-2])
def test_agrees_with_dp_accounting(mu, delta):
    event = dp_accounting.GaussianDpEvent(1.0 / mu)
    pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event)
    assert gaussian.epsilon(mu, delta) == pytest.approx(pld.get_epsilon(delta), abs=1e-6, rel=1e-6)
    orders = [1.0 + 1.01**i for i in range(-500, 700)]
    renyi = rdp.RdpAccountant(orders).compose(event).get_epsilon(delta)
    ours = gaussian.epsilon_from_rho_by_rdp(mu**2 / 2, delta)
    assert renyi * (1 - 1e-4) <= ours <= renyi * (1 + 1e-9)


@given(mu=_mus, delta=_deltas)
@settings(max_examples=60, deadline=None)
def test_conversions_from_rho_are_ordered(mu, delta):
    rho = mu**2 / 2
    exact = gaussian.epsilon(mu, delta)
    by_rdp = gaussian.epsilon_from_rho_by_rdp(rho, delta)
    classic = rho + 2 * math.sqrt(rho * math.log(1 / delta))  # Bun & Steinke 2016, Prop. 1.3.
    assert exact <= by_rdp * (1 + 1e-9) + 2e-12 * mu
    assert by_rdp <= classic * (1 + 1e-9)


@given(
    mu=_mus,
    delta=_deltas,
    mu_factor=st.floats(1.0, 10.0),
    delta_factor=st.floats(1.0, 10.0),
)
@settings(max_examples=60, deadline=None)
def test_epsilon_is_monotone(mu, delta, mu_factor, delta_factor):
    epsilon = gaussian.epsilon(mu, delta)
    slack = 1e-11 * (epsilon + mu)
    assert gaussian.epsilon(mu * mu_factor, delta) >= epsilon - slack
    if delta * delta_factor < 1.0:
        assert gaussian.epsilon(mu, delta * delta_factor) <= epsilon + slack


# Gboard paper (Xu et al. 2023): Appendix A and Table 2, epsilon at delta = 1e-10 of a printed rho.
@pytest.mark.parametrize(
    "rho, epsilon",
    [(0.25, 4.49), (1.86, 13.69), (0.89, 9.01), (0.61, 7.31), (0.32, 5.13), (0.99, 9.56)],
)
def test_published_epsilons_of_rho(rho, epsilon):
    assert gaussian.epsilon(gaussian.mu_from_rho(rho), 1e-10) == pytest.approx(epsilon, abs=0.0051)


def test_es_es_of_2022_by_both_conversions():
    # McMahan & Thakurta 2022: rho = .81 is S² = 79 at z = 7; epsilon was given as 8.90.
    rho = 79 / 98
    assert gaussian.epsilon(gaussian.mu_from_rho(rho), 1e-10) == pytest.approx(8.5261, abs=1e-4)
    assert gaussian.epsilon_from_rho_by_rdp(rho, 1e-10) == pytest.approx(8.90, abs=0.005)


@pytest.mark.parametrize("delta", _DELTAS)
def test_limits(delta):
    assert gaussian.epsilon(0.0, delta) == 0.0
    assert gaussian.epsilon(math.inf, delta) == math.inf
    assert gaussian.log_delta(0.0, 1.0) == -math.inf
    assert gaussian.delta(math.inf, 1.0) == 1.0
    assert gaussian.epsilon_from_rho_by_rdp(0.0, delta) == 0.0
    assert gaussian.epsilon_from_rho_by_rdp(math.inf, delta) == math.inf


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: gaussian.epsilon(-1.0, 1e-6), "mu"),
        (lambda: gaussian.epsilon(math.nan, 1e-6), "mu"),
        (lambda: gaussian.epsilon(1.0, 0.0), "delta"),
        (lambda: gaussian.epsilon(1.0, 1.0), "delta"),
        (lambda: gaussian.delta(1.0, -0.1), "epsilon"),
        (lambda: gaussian.mu(1.0, math.nan), "delta"),
        (lambda: gaussian.epsilon_from_rho_by_rdp(-1.0, 1e-6), "rho"),
        (lambda: gaussian.mu_from_rho(-1.0), "rho"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()


_ANY_MU = [0.0, 5e-324, 1e-200, 1e-20, 1e-3, 1.0, 80.0, 1e8, 1e155, 1e300, math.inf]
_ANY_EPSILON = [0.0, 5e-324, 1e-200, 1e-10, 1.0, 1e10, 1e17, 1e200, 1.7e308]
_ANY_DELTA = [5e-324, 1e-300, 1e-10, 0.5, 0.999, 1 - 1e-10, 1 - 2**-53]


@pytest.mark.filterwarnings("error")
def test_no_argument_is_too_extreme():
    for mu, delta in itertools.product(_ANY_MU, _ANY_DELTA):
        epsilon = gaussian.epsilon(mu, delta)
        assert epsilon >= 0.0
        if epsilon < math.inf:
            assert gaussian.delta(mu, epsilon) <= delta * (1 + 1e-9)
    for mu, epsilon in itertools.product(_ANY_MU, _ANY_EPSILON):
        assert gaussian.log_delta(mu, epsilon) <= 1e-15
    for epsilon, delta in itertools.product(_ANY_EPSILON, _ANY_DELTA):
        assert 0.0 < gaussian.mu(epsilon, delta) < math.inf
    for rho, delta in itertools.product([*_ANY_EPSILON, math.inf], _ANY_DELTA):
        assert gaussian.epsilon_from_rho_by_rdp(rho, delta) >= 0.0
    assert gaussian.epsilon(1e300, 1e-10) == math.inf
    assert 0.0 < gaussian.mu_from_rho(1.7e308) < math.inf


@pytest.mark.parametrize("delta", [0.9, 0.999, 1 - 1e-6, 1 - 1e-10])
@pytest.mark.parametrize("mu", [11.0, 30.0])
def test_epsilon_is_not_understated_where_delta_is_close_to_one(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    assert _log_delta(mu, epsilon) <= math.log(delta)
    assert _log_delta(gaussian.mu(epsilon, delta), epsilon) <= math.log(delta)


@pytest.mark.parametrize("mu", [1e-8, 1e-6, 1e-4, 3.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-10])
def test_epsilon_is_never_below_the_exact_one_and_dp_accountings_is_elsewhere(mu, delta):
    # What keeps ours beside dp_accounting.gaussian_mechanism; see the module's docstring.
    assert _log_delta(mu, gaussian.epsilon(mu, delta)) <= math.log(delta)
    if (mu, delta) == (1e-8, 1e-300):
        theirs = gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta)
        # Below the exact one or above it, as the version of SciPy has it.
        assert theirs != pytest.approx(gaussian.epsilon(mu, delta), rel=1e-7, abs=0.0)


@pytest.mark.parametrize("x", [-0.9, 0.0, 0.5, 3.0, 59.9, 60.1, 100.0, 1e3, 1e6])
def test_the_slope_of_erfcx_keeps_its_digits_where_it_vanishes(x):
    with mpmath.workdps(80):
        exact = 2 / mpmath.sqrt(mpmath.pi) - 2 * mpmath.mpf(x) * (
            mpmath.exp(mpmath.mpf(x) ** 2) * mpmath.erfc(x)
        )
    # Below 60 the difference of two numbers near 2/√π is taken: x² roundings of 2⁻⁵³.
    rounding = 8 * 2.0**-53 * max(1.0, min(x, 60.0) ** 2)
    assert float(gaussian._minus_erfcx_slope(np.array(x))) == pytest.approx(
        float(exact), rel=rounding
    )
