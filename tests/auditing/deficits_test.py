import numpy as np
import pytest

from tff_dpftrl.auditing import deficits

_TENSORS = np.repeat([0, 1], 40)
_POSITIONS = np.tile(np.arange(40), 2)
_INVERSE = np.linalg.inv(np.eye(8) + 0.4 * np.tri(8, k=-1))
_COVARIANCE = 4.0 * _INVERSE @ _INVERSE.T


def _noise(seed, runs=6):
    draws = np.random.default_rng(seed).normal(size=(runs, 8, 80))
    return 2.0 * np.einsum("ij,rjc->ric", _INVERSE, draws)


def _violated(noise, error_rate=1e-4):
    recorded = deficits.Recorded.whitened(noise, _COVARIANCE, _TENSORS, _POSITIONS)
    found = recorded.findings(error_rate)
    return {finding.test for finding in found if finding.outcome == "violated"}


def test_noise_as_claimed_is_called_violated_no_more_often_than_it_may():
    count = sum(bool(_violated(_noise(seed), error_rate=0.05)) for seed in range(200))
    # 10 expected at most, standard deviation 3.1; Bonferroni makes it fewer.
    assert 0 < count <= 10 + 4 * 3.1


def test_more_noise_than_claimed_violates_nothing():
    assert not _violated(1.5 * _noise(0))


def _same_tensors(noise):
    noise[:, :, 40:] = noise[:, :, :40]


def _opposite_runs(noise):
    noise[3] = -noise[1]


def _same_rounds(noise):
    noise[:, 5] = noise[:, 2]


def _neighbours(noise):
    noise[:, :, 1::2] = noise[:, :, ::2]


def _less(noise):
    noise *= 0.9


@pytest.mark.parametrize(
    "change, test",
    [
        (_same_tensors, "the noise of different tensors"),
        (_opposite_runs, "the noise of different runs"),
        (_same_rounds, "the noise over rounds"),
        (_neighbours, "the noise of different coordinates"),
        (_less, "the noise of different tensors"),
    ],
)
def test_noise_that_is_less_than_claimed_somewhere_is_found(change, test):
    noise = _noise(0)
    change(noise)
    assert test in _violated(noise)
