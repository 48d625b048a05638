"""The claim of an audit: what it is made of, and which tests it allows."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.accounting import gaussian, guarantee, parts, statement
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema as schema_lib

_RATES = np.linspace(0.0, 1.0, 21)


def _guarantee(**kwargs):
    return guarantee.dp_ftrl_guarantee(
        identity.Identity(),
        schema=schema_lib.MinSep(8, 2, 4),
        delta=1e-6,
        **({"noise_multiplier": 3.0} | kwargs),
    )


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_the_trade_off_of_a_gaussian_is_that_of_its_thresholds(mu):
    thresholds = np.linspace(-3.0, 3.0 + mu, 13)
    found = claim_lib.Claim.gaussian(mu, 1e-6).least_false_negative_rate(stats.norm.sf(thresholds))
    np.testing.assert_allclose(found, stats.norm.cdf(thresholds - mu), rtol=1e-9)


def test_the_trade_off_of_epsilon_and_delta_is_the_definition():
    claim = claim_lib.Claim(0.7, 0.01)
    found = claim.least_false_negative_rate(_RATES)
    for a, b in zip(_RATES, found, strict=True):
        # Neither direction of (ε, δ)-DP is broken, and one of them, or 0, is met.
        slack = (
            math.exp(0.7) * b + 0.01 - (1.0 - a),
            math.exp(0.7) * a + 0.01 - (1.0 - b),
            b,
        )
        assert min(slack) == pytest.approx(0.0, abs=1e-12)
    assert found[0] == pytest.approx(0.99)


def test_a_claim_at_one_delta_allows_what_its_gaussian_allows():
    whole = claim_lib.Claim.gaussian(1.3, 1e-3)
    point = claim_lib.Claim(whole.epsilon, whole.delta)
    gap = whole.least_false_negative_rate(_RATES) - point.least_false_negative_rate(_RATES)
    assert np.all(gap > -1e-12) and np.max(gap) > 0.1


def test_claims_are_made_of_what_promises():
    found = _guarantee()
    mu = 2.0 / 3.0  # Four times, each of norm 1, at a standard deviation of 3.
    assert claim_lib.Claim.of(found).mu == pytest.approx(mu)
    stated = statement.dp_ftrl_statement(found, unit_of_privacy="user")
    assert claim_lib.Claim.of(stated).mu == pytest.approx(mu)
    assert claim_lib.Claim.of(stated).epsilon == gaussian.epsilon(mu, 1e-6)
    words = parts.Part(parts.VOCABULARY, "words", rho_zcdp=0.1, delta=1e-9)
    with_words = claim_lib.Claim.of(dataclasses.replace(found, others=(words,)))
    assert with_words.mu is None and with_words.epsilon > gaussian.epsilon(mu, 1e-6)
    only = claim_lib.Claim(1.0, 1e-6)
    assert claim_lib.Claim.of(only) is only


def test_a_claim_is_shown_with_no_less_than_it_is():
    assert str(claim_lib.Claim(1.23441, 1e-6, 0.300001)) == "μ = 0.3001, ε = 1.235"
    assert str(claim_lib.Claim(2.00001, 1e-6)) == "ε = 2.001"


@pytest.mark.parametrize("nothing", [_guarantee(noise_multiplier=0.0), "ε = 1", None])
def test_what_promises_nothing_is_no_claim(nothing):
    with pytest.raises(ValueError, match="^claim "):
        claim_lib.Claim.of(nothing)


@pytest.mark.parametrize("numbers", [(-1.0, 1e-6), (1.0, 0.0), (1.0, 1e-6, -1.0)])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(ValueError, match="must be"):
        claim_lib.Claim(*numbers)
