"""Tests of tff_dpftrl.training.vocabulary_share."""

import math
import statistics

import pytest

from tff_dpftrl.accounting import display, parts
from tff_dpftrl.training import vocabulary_share


def test_a_share_of_the_budget_is_a_share_of_squared_mu():
    counting = vocabulary_share.counting(8.0, 1e-5, "vocabulary=0.25")
    # The Gaussian mechanism of half its noise spends the whole budget (Balle and Wang 2018).
    whole = 2.0 / counting.noise_multiplier
    cdf = statistics.NormalDist().cdf
    delta = cdf(whole / 2 - 8.0 / whole) - math.exp(8.0) * cdf(-whole / 2 - 8.0 / whole)
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert counting.delta == pytest.approx(1e-6)
    assert vocabulary_share.counting(8.0, 1e-5).noise_multiplier > counting.noise_multiplier


def test_the_part_costs_no_less_than_its_noise_does():
    for shares in (None, "vocabulary=0.3", "metrics=0.2"):
        counting = vocabulary_share.counting(3.0, 1e-6, shares)
        part = vocabulary_share.part(3.0, 1e-6, shares)
        assert part.name == parts.VOCABULARY and part.delta == counting.delta
        assert counting.rho_zcdp <= part.rho_zcdp <= counting.rho_zcdp * (1.0 + 1e-9)
        # Neither noise nor threshold is more in words than it is.
        assert f"standard deviation {display.round_down(counting.noise_multiplier)} " in part.says
        assert f"a threshold of {display.round_down(counting.threshold)} " in part.says
