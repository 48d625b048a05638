"""Noise of a run: sound noise is accused as rarely as said, and what has none is found."""

import numpy as np
import pytest

from tff_dpftrl.auditing.evidence import run_noise, worst_pattern
from tff_dpftrl.mechanisms import banded_toeplitz

_ROUNDS = 20
_SIZES = [1, 0, 300, 5]
_COVARIANCE = 4.0 * worst_pattern.noise_covariance(
    banded_toeplitz.BandedToeplitz((1.0, 0.5, 0.25)), _ROUNDS
)
_FACTOR = np.linalg.cholesky(_COVARIANCE)


def _outcomes(noise, error_rate=1e-6, rounding=None, total=_ROUNDS):
    found = run_noise.RunNoise(
        _SIZES, _COVARIANCE, most_vectors=len(noise), error_rate=error_rate, rounding=rounding
    )
    for t, values in enumerate(noise):
        found.add(t, values)
    findings = found.findings("noise", "round", total)
    return {finding.test.removeprefix("noise: "): finding for finding in findings}


def _sound(rng):
    return _FACTOR @ rng.normal(size=(_ROUNDS, sum(_SIZES)))


_BY_ROUND, _BY_TENSOR, _PAIRS = (
    "standard deviation of each round",
    "standard deviation of each tensor",
    "correlation of rounds",
)


@pytest.mark.parametrize(
    "plant, test",
    [
        (lambda noise: noise[7].fill(0.0), _BY_ROUND),
        (lambda noise: noise[7, 1:65].fill(0.0), _BY_ROUND),
        (lambda noise: noise[7].fill(np.nan), _BY_ROUND),
        (lambda noise: noise[:, 0].fill(0.0), _BY_TENSOR),
        (lambda noise: np.multiply(noise[:, -5:], 0.5, out=noise[:, -5:]), _BY_TENSOR),
        (lambda noise: np.copyto(noise[12], noise[4]), _PAIRS),
    ],
    ids=["a round", "a block", "not finite", "a scalar", "half of a tensor", "twice the same"],
)
def test_what_lacks_noise_is_found(plant, test, monkeypatch):
    monkeypatch.setattr(run_noise, "_BLOCK", 64)
    noise = _sound(np.random.default_rng(0))
    assert {one.outcome for one in _outcomes(noise).values()} == {"consistent"}
    plant(noise)
    assert _outcomes(noise)[test].outcome == "violated"


def test_sound_noise_is_accused_as_rarely_as_said():
    rng, accused = np.random.default_rng(1), np.zeros(3)
    for _ in range(80):
        found = _outcomes(_sound(rng), error_rate=0.3).values()
        accused += [one.outcome == "violated" for one in found]
    assert np.all(accused <= 17)  # Of Binomial(80, 0.1), more in one of a thousand.
    assert np.all(accused[:2] > 0)  # It could fail: the margin is no wider than need be.


def test_of_long_runs_some_rounds_are_compared_with_each_other(monkeypatch):
    monkeypatch.setattr(run_noise, "_MOST_TOGETHER", 5)
    noise = _sound(np.random.default_rng(3))
    assert {one.outcome for one in _outcomes(noise).values()} == {"consistent"}
    noise[9] = noise[4]  # The second and the third of them.
    found = _outcomes(noise)[_PAIRS]
    assert found.outcome == "violated" and "rounds 2 and 3 of the 5 compared ones" in found.says
    assert str(found.covers[0]) == "rounds 1, 5, 10, 15 and 20 of 20"


def test_findings_name_rounds_and_the_tensors_whose_noise_can_be_seen():
    rng = np.random.default_rng(2)
    found = _outcomes(_sound(rng), total=50)
    assert [str(one) for one in found[_BY_ROUND].covers] == [
        "rounds 1 to 20 of 50",
        "tensor 2 of 3",  # A round has too few values of the others.
    ]
    assert str(found[_BY_TENSOR].covers[1]) == "all 3 tensors"
    # Weights that are so large that their rounding swallows the noise.
    rounding = np.repeat([10.0, 0.0], [301, 5])
    noise = _sound(rng)
    noise[:, :301] = 0.0
    found = _outcomes(noise, rounding=rounding)
    assert found[_BY_ROUND].outcome == "not tested"
    assert found[_BY_TENSOR].outcome == "consistent"
    assert str(found[_BY_TENSOR].covers[1]) == "tensor 3 of 3"
