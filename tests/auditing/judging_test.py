"""Findings from recorded games: which bound decides, and when."""

import numpy as np
import pytest
from scipy import special

from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import judging
from tff_dpftrl.auditing.evidence import transcripts as transcripts_lib

_RUNS, _CANARIES = 4, 60
_DELTA = 0.3


def _all_or_nothing(rng):
    """Games with a (0, δ)-DP mechanism: it releases a run as it is with chance δ, or noise alone.

    All canaries of a run are seen, or none: trials are not independent.
    """
    present = rng.integers(0, 2, (_RUNS, _CANARIES)).astype(bool)
    is_seen = rng.random(_RUNS) < _DELTA
    released = rng.normal(scale=1e-3, size=(_RUNS, _CANARIES, 3))
    released[..., 0] += is_seen[:, np.newaxis] * present
    return transcripts_lib.Transcripts(released.reshape(-1, 3), present.ravel())


@pytest.mark.parametrize("are_independent", [True, False])
def test_a_mechanism_that_ties_its_coordinates_is_not_called_violated_for_it(are_independent):
    rng = np.random.default_rng(0)
    judge = judging.Judge(claim_lib.Claim(epsilon=0.5, delta=_DELTA), 0.01, seed=1)
    found = [judge.learned(_all_or_nothing(rng), are_independent)[0] for _ in range(60)]
    violated = sum(finding.outcome == "violated" for finding in found)
    # Three runs or all four are seen with chance 0.08: taken for independent, trials are wrong.
    assert violated == 0 if not are_independent else violated > 2


def _not_hidden(claim, trials=400):
    """The finding about releases almost without noise."""
    rng = np.random.default_rng(2)
    present = rng.integers(0, 2, trials).astype(bool)
    released = np.stack([present, ~present], axis=1) + rng.normal(scale=0.01, size=(trials, 2))
    judge = judging.Judge(claim, 0.01, seed=1)
    return [
        judge.learned(transcripts_lib.Transcripts(released, present), are_independent)[0]
        for are_independent in (False, True)
    ]


def test_what_is_not_hidden_at_all_is_violated_without_independence():
    finding, _ = _not_hidden(claim_lib.Claim(epsilon=2.0, delta=1e-6))
    assert finding.outcome == "violated" and finding.mu_at_least is None
    # Three numbers of guesses were tried; all of the 100 were right: q^100 = 0.01 / 3.
    assert "Of 200 canaries 100 of 100 guesses show" in finding.says
    assert finding.epsilon_at_least == pytest.approx(special.logit((0.01 / 3) ** 0.01), abs=0.01)


@pytest.mark.parametrize("epsilon, mu", [(2.0, 0.5), (8.0, 1.5)])
def test_trials_that_could_not_refute_a_claim_do_not_test_it(epsilon, mu):
    can_refute = epsilon == 2.0
    outcome = "violated" if can_refute else "not tested"
    for finding in _not_hidden(claim_lib.Claim(epsilon, 1e-6)):
        assert finding.outcome == outcome
        assert ("so many cannot refute it" in finding.says) != can_refute
        most = float(finding.power.partition("no ε above ")[2].partition(",")[0])
        assert 0.9 * most < finding.epsilon_at_least <= most
    one_run, independent = _not_hidden(claim_lib.Claim.gaussian(mu, 1e-6))
    assert one_run.outcome == outcome and independent.outcome == "violated"
    assert ("give mechanism, or canaries_per_run=1" in one_run.says) != can_refute
    # The bound of ε is one of its own, not that of a Gaussian mechanism of the bound of μ.
    each = 0.01 / 2 / 3
    assert one_run.epsilon_at_least == pytest.approx(special.logit(each**0.01), abs=0.01)
    assert 0.5 < one_run.mu_at_least < 1.5
