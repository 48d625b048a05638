"""Tests of the grid's sizes and sensitivities, against enumeration and published numbers."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.discretization import grid

_DIMS = st.one_of(st.integers(1, 300), st.integers(300, 2**24))
_CLIENTS = st.integers(1, 10_000)
_ALPHAS = st.floats(1e-6, 0.999)
_SETTINGS = hypothesis.settings(deadline=None, derandomize=True)


def _all_roundings(x):
    """Every rounding of x with its probability, shapes [2^d, d] and [2^d]."""
    floor = np.floor(x)
    fraction = x - floor
    ups = np.array(list(itertools.product((0, 1), repeat=len(x))))
    probabilities = np.prod(np.where(ups, fraction, 1 - fraction), axis=1)
    return floor + ups, probabilities


def _adversarial_vectors(dim, norm):
    """Vectors of norm at most `norm` whose roundings tend to be long."""
    rng = np.random.default_rng(dim)
    yield np.zeros(dim)
    yield np.full(dim, norm / math.sqrt(dim))
    yield np.eye(dim)[0] * norm
    for fraction in (0.05, 0.3, 0.5, 0.7, 0.95):
        if fraction * math.sqrt(dim) <= norm:
            yield np.full(dim, fraction)
            rest = math.sqrt(norm**2 - (dim - 1) * fraction**2)
            yield np.append(np.full(dim - 1, fraction), rest)
    for _ in range(20):
        x = rng.normal(size=dim) * rng.uniform(size=dim) ** 3
        yield x * norm / np.linalg.norm(x)


@_SETTINGS
@hypothesis.given(_DIMS, st.integers(1, 2000), st.integers(18, 31), st.floats(0.01, 20))
def test_noise_in_the_sum_has_room_in_its_modulus(dim, clients, bits, ratio):
    try:
        encoding = grid.for_bits(dim, clients, bits, noise_ratio=ratio)
    except ValueError as error:
        assert "noise" in str(error)
        return
    assert encoding.bits_per_parameter <= bits
    assert encoding.inflation >= grid.for_bits(dim, clients, bits).inflation
    room = (encoding.modulus - 1) // 2 - clients * encoding.max_coordinate
    stddev = ratio * encoding.scaled_clip_norm * encoding.inflation
    # Twice the tail of a Gaussian for each coordinate; rounding moves it by half a step.
    tail = math.erfc((room - 0.5) / stddev / math.sqrt(2))
    assert encoding.padded_dim * tail <= grid.WRAPAROUND_PROBABILITY
    assert encoding.to_dict()["noise_ratio"] == ratio


def test_noise_without_room_is_refused():
    with pytest.raises(ValueError, match="bits_per_parameter 10 has no room for noise of 5 clip"):
        grid.for_bits(3000, 10, 10, noise_ratio=5.0)


def test_a_grid_without_noise_is_what_it_was():
    encoding = grid.for_bits(3000, 40, 20)
    assert encoding.modulus == 2 * encoding.max_coordinate * 40 + 1
    assert "noise_ratio" not in encoding.to_dict()


def test_published_inflated_norm():
    # A public Google test: 16 bits, 2^20 parameters, clip 0.03, 100 clients.
    inflated = grid.inflated_clip_norm(0.03, 0.0001248800740568264, 2**20)
    assert inflated == pytest.approx(0.0707097967941405, rel=1e-14)


def test_formula_of_the_paper_in_its_own_units():
    clip_norm, scale, alpha, dim = 0.7, 900.0, 0.2, 512
    slack = math.sqrt(2 * math.log(1 / alpha))
    expected = clip_norm**2 + dim / (4 * scale**2)
    expected += slack * (clip_norm / scale + math.sqrt(dim) / (2 * scale**2))
    encoding = grid.GridEncoding(dim - 100, 10, scale * clip_norm, alpha)
    expected = math.sqrt(expected)
    assert grid.inflated_clip_norm(clip_norm, 1 / scale, dim, alpha) == pytest.approx(
        expected, rel=1e-14
    )
    charged = encoding.inflated_clip_norm(clip_norm)
    assert charged == pytest.approx(expected * (1 + grid.DECODING_ALLOWANCE), rel=1e-14)
    assert encoding.granularity(clip_norm) == pytest.approx(1 / scale)
    max_coordinate = math.ceil(2 * scale * clip_norm * math.log(dim) / math.sqrt(dim))
    assert encoding.max_coordinate == max_coordinate
    assert encoding.modulus == 2 * max_coordinate * 10 + 1


@pytest.mark.parametrize("dim", [1, 2, 4, 8])
@pytest.mark.parametrize("norm", [0.4, 1.0, 3.3, 40.0])
@pytest.mark.parametrize("alpha", [0.05, math.exp(-0.5), 0.95])
def test_rejection_probability_and_bias_by_enumeration(dim, norm, alpha):
    encoding = grid.GridEncoding(dim, 1, norm, alpha)
    for x in _adversarial_vectors(dim, norm):
        roundings, probabilities = _all_roundings(x)
        accepted = np.sum(roundings**2, axis=1) <= encoding.max_squared_norm
        acceptance = np.sum(probabilities[accepted])
        assert acceptance >= 1 - alpha - 1e-12
        mean = probabilities[accepted] @ roundings[accepted] / acceptance
        assert np.linalg.norm(mean - x) <= encoding.rounding_bias_bound + 1e-9


def test_conditioning_does_reject_and_bias():
    # The bounds above are not vacuous: some vector is rejected and biased.
    encoding = grid.GridEncoding(8, 1, 1.5, 0.95)
    x = np.full(8, 0.5)
    roundings, probabilities = _all_roundings(x)
    accepted = np.sum(roundings**2, axis=1) <= encoding.max_squared_norm
    acceptance = np.sum(probabilities[accepted])
    assert acceptance < 0.9
    mean = probabilities[accepted] @ roundings[accepted] / acceptance
    assert np.linalg.norm(mean - x) > 0.05


def test_the_largest_modulus_is_that_of_int32():
    # 2 n c + 1 for n clients with coordinates up to c: (2³¹ − 2) / 2 = 21483 · 49981.
    encoding = grid.GridEncoding(1, 21483, 49981.0)
    assert encoding.modulus == encoding.sum_modulus == np.iinfo(np.int32).max
    with pytest.raises(ValueError, match="above the largest of an int32 sum, 2147483647"):
        grid.GridEncoding(1, 21484, 49981.0)


def test_the_largest_coordinate_has_half_steps_in_float32():
    largest = grid.GridEncoding(1, 1, 2.0**22).max_coordinate
    half = np.float32(largest - 0.5)
    assert largest == 2**22 and half == largest - 0.5
    with pytest.raises(ValueError, match="which float32 cannot round faithfully"):
        grid.GridEncoding(1, 1, 2.0**22 + 1.0)


def test_rounding_adds_half_a_grid_step_for_a_client():
    encoding = grid.GridEncoding(64, 100, 40.0, rejection_bound=0.2)
    # A coordinate half way between two steps, in the unit of a clip norm of 5: 5 / 40 a step.
    assert encoding.rounding_stddev_bound(5.0, 1) == 0.5 * 5.0 / 40.0
    assert encoding.rounding_stddev_bound(5.0, 100) == 10 * 0.5 * 5.0 / 40.0
    # Of a mean over 4/5 of the roundings: at most √((1/5) / (4/5)) standard deviations off.
    assert encoding.rounding_bias_bound == pytest.approx(0.5 * 0.5)


def test_no_coordinate_bound_for_the_smallest_dimensions():
    # The paper's 2 ln(d) / √d is 0 for d = 1.
    for dim in (1, 2, 4, 64):
        assert grid.GridEncoding(dim, 1, 10.0).max_coordinate == 10


@_SETTINGS
@hypothesis.given(_DIMS, _CLIENTS, st.integers(1, 31), _ALPHAS)
def test_for_bits_uses_the_bits(dim, clients, bits, alpha):
    hypothesis.assume(2 * clients + 1 <= 2**bits)
    encoding = grid.for_bits(dim, clients, bits, rejection_bound=alpha)
    assert encoding.bits_per_parameter <= bits
    assert encoding.modulus <= min(2**bits, grid.MAX_MODULUS)
    assert 2 * encoding.max_coordinate * clients < encoding.modulus
    assert encoding.modulus <= encoding.power_of_two_modulus < 2 * encoding.modulus
    rounded = encoding.power_of_two_modulus
    fits = rounded <= grid.MAX_MODULUS
    assert encoding.sum_modulus == (rounded if fits else encoding.modulus)
    assert encoding.modulus <= encoding.sum_modulus <= grid.MAX_MODULUS
    if encoding.max_coordinate < grid.MAX_COORDINATE:
        with_one_more = 2 * (encoding.max_coordinate + 1) * clients + 1
        assert with_one_more > min(2**bits, grid.MAX_MODULUS)
        factor = encoding.max_coordinate / encoding.scaled_clip_norm
        assert factor == pytest.approx(grid.coordinate_factor(encoding.padded_dim), rel=1e-12)


@_SETTINGS
@hypothesis.given(_DIMS, _CLIENTS, st.floats(1.00001, 100.0), _ALPHAS)
def test_for_inflation_is_the_coarsest(dim, clients, inflation, alpha):
    try:
        encoding = grid.for_inflation(dim, clients, inflation, rejection_bound=alpha)
    except ValueError:  # It needs too large a modulus.
        hypothesis.reject()
    assert 1 <= encoding.inflation <= inflation
    coarser = grid.GridEncoding(dim, clients, encoding.scaled_clip_norm * (1 - 1e-6), alpha)
    assert coarser.inflation > inflation


@_SETTINGS
@hypothesis.given(_DIMS, _CLIENTS, st.floats(0.01, 1e5), _ALPHAS)
def test_invariants(dim, clients, norm, alpha):
    try:
        encoding = grid.GridEncoding(dim, clients, norm, alpha)
    except ValueError:
        hypothesis.reject()
    assert encoding.padded_dim >= dim > encoding.padded_dim // 2
    assert encoding.inflation >= 1
    # What is charged is never below what the integer test admits.
    charged = encoding.inflated_clip_norm(2.0) / encoding.granularity(2.0)
    assert charged**2 >= encoding.max_squared_norm * (1 - 1e-14)
    assert encoding.upload_bytes * 8 >= encoding.padded_dim * encoding.bits_per_parameter
    assert encoding.to_dict()["inflation"] == encoding.inflation
    finer = grid.inflated_norm_squared(2 * norm, encoding.padded_dim, alpha) / (2 * norm) ** 2
    assert finer < encoding.inflation**2


def test_costs_of_a_four_million_parameter_model():
    # More bits cost upload and save noise; so does a tighter ℓ∞ bound, for free.
    sizes = [grid.for_bits(4_050_000, 100, bits) for bits in (10, 12, 16, 20)]
    inflations = [encoding.inflation for encoding in sizes]
    assert inflations == sorted(inflations, reverse=True)
    assert inflations[-1] < 1.00001 and inflations[0] > 3
    assert sizes[-1].upload_bytes == 2**22 * 20 // 8
    tight = grid.for_bits(4_050_000, 100, 12, linf_stddevs=10.0)
    assert tight.inflation < sizes[1].inflation


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1, 1.0), "dim"),
        ((2.5, 1, 1.0), "dim"),
        ((1, 0, 1.0), "max_clients"),
        ((1, 1, 0.0), "scaled_clip_norm"),
        ((1, 1, math.inf), "scaled_clip_norm"),
        ((1, 1, math.nan), "scaled_clip_norm"),
        ((1, 1, 1e9), "scaled_clip_norm"),
        ((2**22, 1, 5e9, 0.5, 1.0), "scaled_clip_norm"),
        ((1, 2**20, 1e6), "modulus"),
        ((1, 1, 1.0, 0.0), "rejection_bound"),
        ((1, 1, 1.0, 1.0), "rejection_bound"),
        ((1, 1, 1.0, 0.5, -1.0), "linf_stddevs"),
    ],
)
def test_bad_arguments(arguments, name):
    with pytest.raises(ValueError, match=name):
        grid.GridEncoding(*arguments)


def test_bad_choices():
    with pytest.raises(ValueError, match="at least 8 bits"):
        grid.for_bits(100, 100, 7)
    grid.for_bits(100, 100, 8)
    with pytest.raises(ValueError, match="bits_per_parameter"):
        grid.for_bits(100, 100, 0)
    for inflation in (1.0, 1.000001, 0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="inflation"):
            grid.for_inflation(100, 100, inflation)
    with pytest.raises(ValueError, match="modulus"):
        grid.for_inflation(100, 2**28, 1.001)
