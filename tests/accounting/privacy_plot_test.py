"""Tests of `privacy.png`: what its curves are, and that its axes are named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.accounting import guarantee, parts, privacy_plot, statement
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema as schema_lib

_RUN = parts.SampledRounds(1.0, 0.05, 20)
_EPSILON = parts.compose(_RUN, (), 1e-7)


def _gaussian():
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(),
        noise_multiplier=4.0,
        schema=schema_lib.MinSep(16, 1, 16),
        delta=1e-7,
    )
    return statement.dp_ftrl_statement(claim, unit_of_privacy="user")


def _sampled():
    claim = statement.SampledClaim(
        mechanism="dp-fedavg",
        epsilon=_EPSILON,
        delta=1e-7,
        accounting="PLD.",
        sampling="Poisson.",
        profile=parts.profile(_RUN, (), _EPSILON),
    )
    return statement.sampled_statement(claim)


def _lines(axes):
    return {line.get_label().partition(":")[0]: line for line in axes.get_lines()}


@pytest.mark.parametrize("make", [_gaussian, pytest.param(_sampled, marks=pytest.mark.slow)])
def test_the_picture_has_the_curves_of_the_statement(make):
    stated = make()
    left, right = privacy_plot.draw(stated).axes
    for axes in (left, right):
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_legend()
    trade_off = _lines(left)
    rates, missed = trade_off["this run"].get_data()
    np.testing.assert_array_equal(missed, stated.trade_off().least_false_negative_rate(rates))
    assert np.all(missed <= trade_off["chance"].get_ydata() + 1e-12)
    wrong = 1.0 - stated.trade_off().best_guess()
    assert trade_off["guess after a coin"].get_xydata().tolist() == [[wrong, wrong]]
    ((epsilon, delta),) = _lines(right)["stated"].get_xydata().tolist()
    assert (epsilon, delta) == (stated.epsilon, 1e-7) and right.get_yscale() == "log"


def test_a_gaussian_run_is_drawn_as_one_and_a_sampled_one_by_its_profile():
    left, right = privacy_plot.draw(_gaussian()).axes  # S = 4 and z = 4: mu = 1.
    rates, missed = _lines(left)["this run"].get_data()
    np.testing.assert_allclose(missed, stats.norm.cdf(-1.0 + stats.norm.isf(rates)), atol=1e-12)
    assert _lines(right)["this run"].get_ydata()[-1] == pytest.approx(1e-7, rel=1e-6)
    _, right = privacy_plot.draw(_sampled()).axes
    points = [tuple(point) for point in _lines(right)["this run"].get_xydata().tolist()]
    assert tuple(points) == parts.profile(_RUN, (), _EPSILON)


def test_a_statement_without_a_guarantee_has_no_picture():
    nothing = dataclasses.replace(
        _gaussian(), epsilon=None, rho_zcdp=None, no_guarantee=("No noise.",)
    )
    with pytest.raises(ValueError, match="no curve to draw"):
        privacy_plot.draw(nothing)
