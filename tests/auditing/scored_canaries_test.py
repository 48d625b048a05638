"""Tests of bounds from scores of canaries, against an independent computation."""

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.auditing import scored_canaries
from tff_dpftrl.auditing.evidence import one_run


@pytest.mark.parametrize("canaries", [100, 1000])
@pytest.mark.parametrize("shift", [0.0, 1.5, 50.0])
def test_a_bound_without_delta_is_clopper_and_pearsons(canaries, shift):
    rng = np.random.default_rng(canaries)
    present = rng.integers(0, 2, canaries).astype(bool)
    scores = rng.standard_normal(canaries) + shift * present
    order, largest = np.argsort(scores), 0.0
    for share in one_run.FRACTIONS:
        number = round(share * canaries)
        lowest, highest = order[: number // 2], order[canaries - (number - number // 2) :]
        right = int((~present[lowest]).sum() + present[highest].sum())
        level = 1 - 0.05 / len(one_run.FRACTIONS)
        exact = stats.binomtest(right, number, alternative="greater").proportion_ci(level)
        largest = max(largest, np.log(exact.low / (1 - exact.low)))
    found = scored_canaries.lower_bounds(scores, present, delta=0.0)
    assert found.epsilon_at_least == pytest.approx(largest, abs=1e-6)
    assert (largest > 0) == (shift > 0) and found.mu_at_least is None


def test_a_bound_of_mu_takes_half_of_the_error():
    rng = np.random.default_rng(0)
    present = rng.integers(0, 2, 400).astype(bool)
    scores = rng.standard_normal(400) + 3.0 * present
    both = scored_canaries.lower_bounds(scores, present, delta=1e-6, error_rate=0.1, with_mu=True)
    alone = scored_canaries.lower_bounds(scores, present, delta=1e-6, error_rate=0.05)
    assert both.epsilon_at_least == alone.epsilon_at_least > 0
    assert 0 < both.mu_at_least < 3.0 and both.mu_guesses.guesses <= 400
    # δ makes the bound smaller.
    assert (
        both.epsilon_at_least
        > scored_canaries.lower_bounds(
            scores, present, delta=1e-3, error_rate=0.05
        ).epsilon_at_least
    )
