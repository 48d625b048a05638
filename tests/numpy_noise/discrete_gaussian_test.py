"""Discrete Gaussians have their law, each decision of it exact, and the cost that is proven."""

import mpmath
import numpy as np
import pytest
from scipy import special

from tff_dpftrl import validation
from tff_dpftrl.numpy_noise import discrete_gaussian, secure_draws

_SEED = bytes(range(32))


def _law(stddev: float, largest: int) -> np.ndarray:
    """Returns the probabilities of -largest … largest."""
    weights = np.exp(-(np.arange(-400, 401) ** 2) / (2 * stddev**2))
    return (weights / weights.sum())[400 - largest : 401 + largest]


@pytest.mark.parametrize(("stddev", "largest"), [(0.4, 2), (1.0, 4), (3.7, 12)])
def test_samples_have_the_discrete_gaussian_s_law(stddev, largest):
    size = 200_000
    drawn = discrete_gaussian.sample(_SEED, [1], size, stddev)
    assert drawn.dtype == np.int64 and drawn.shape == (size,)
    values = np.arange(-largest, largest + 1)
    counts = np.array([np.sum(drawn == value) for value in values])
    expected = size * _law(stddev, largest)
    # Six standard deviations of each count, and a few of counts that are tiny.
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected) + 6)
    others = size * _law(1.1 * stddev, largest)
    assert np.any(np.abs(counts - others) > 6 * np.sqrt(others) + 6)


def test_large_parameters_give_the_variance_and_every_residue():
    size, stddev = 200_000, 2.0**34 + 0.5
    drawn = discrete_gaussian.sample(_SEED, [2], size, stddev)
    # The mean of n squares of unit Gaussians has standard deviation √(2/n).
    assert abs(np.mean((drawn / stddev) ** 2) - 1) < 6 * np.sqrt(2 / size)
    assert abs(np.mean(drawn / stddev)) < 6 / np.sqrt(size)
    low = np.bincount(drawn & 255, minlength=256)
    chi_squared = np.sum((low - size / 256) ** 2) / (size / 256)
    assert abs(chi_squared - 255) < 6 * np.sqrt(2 * 255)


def test_decisions_that_float64_leaves_open_are_made_with_all_bits(monkeypatch):
    expected = discrete_gaussian.sample(_SEED, [0], 3_000, 5.5)
    decided = []
    exact = discrete_gaussian._Uniforms.exact

    def counted(self, index, leading):
        value = exact(self, index, leading)
        assert abs(float(value) - (leading + 0.5) * 2.0**-64) < 2.0**-52
        decided.append(value)
        return value

    monkeypatch.setattr(discrete_gaussian._Uniforms, "exact", counted)
    monkeypatch.setattr(discrete_gaussian, "_ERROR", 0.01)  # Most proposals are open then.
    np.testing.assert_array_equal(discrete_gaussian.sample(_SEED, [0], 3_000, 5.5), expected)
    assert len(decided) > 300


def test_proposals_are_the_floors_of_a_library_of_high_precision():
    uniforms = discrete_gaussian._Uniforms(secure_draws.key(_SEED, [9]), 3)
    proposed, _ = discrete_gaussian._propose(uniforms, 200, 2.0**34)
    leading, _ = discrete_gaussian._Uniforms(secure_draws.key(_SEED, [9]), 3).take(200)
    with mpmath.workdps(60):
        floors = [
            int(mpmath.floor(-(2**34 + 1) * mpmath.log(mpmath.mpf(2 * int(word) + 1) / 2**65)))
            for word in leading
        ]
    assert np.abs(proposed).tolist() == floors


def test_samples_are_repeated_by_their_path_alone():
    size = 2 * discrete_gaussian._CHUNK + 5
    drawn = discrete_gaussian.sample(_SEED, [0, 4], size, 9.0)
    np.testing.assert_array_equal(drawn, discrete_gaussian.sample(_SEED, [0, 4], size, 9.0))
    assert np.any(drawn != discrete_gaussian.sample(_SEED, [0, 5], size, 9.0))


def test_the_cost_bounds_every_renyi_divergence_of_integer_shifts():
    stddev = 1.3
    values = np.arange(-400, 401)
    logs = -(values**2) / (2 * stddev**2)
    logs -= special.logsumexp(logs)
    for shift in (1, 2, 5):
        for alpha in (1.5, 2.0, 8.0):
            total = special.logsumexp(alpha * logs[shift:] + (1 - alpha) * logs[:-shift])
            divergence, bound = (
                float(total) / (alpha - 1),
                alpha * discrete_gaussian.zcdp(shift, stddev),
            )
            assert 0.99 * bound <= divergence <= bound * (1 + 1e-9)
    assert discrete_gaussian.zcdp(3, 2.0) == 9 / 8


@pytest.mark.parametrize("stddev", [0.0, -1.0, 2.0**41, float("nan")])
def test_a_parameter_out_of_range_is_refused(stddev):
    with pytest.raises(validation.UsageError, match="stddev"):
        discrete_gaussian.sample(_SEED, [0], 1, stddev)
