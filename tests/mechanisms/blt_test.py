"""Tests of BLTs: streaming against dense, inverse, sensitivity against every pattern."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms.numerics import blt_losses, toeplitz
from tff_dpftrl.participation import schema as schema_lib

# Published production parameters (McMahan, Xu & Zhang 2024, appendix A; min-sep 400, n = 2000).
_PRODUCTION = blt.Blt(
    [0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778],
    [0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748073734],
)

_pairs = st.lists(st.floats(0.05, 2.0), min_size=2, max_size=12).map(
    lambda gaps: np.exp(-np.cumsum(gaps[: len(gaps) // 2 * 2]))[::-1]
)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(chain=_pairs)
def test_pair_gives_a_decreasing_blt_and_its_inverse(chain):
    poles, zeros = chain[0::2], chain[1::2]
    strategy = blt.Blt(1.0 - poles, blt_losses.pole_residues(poles, zeros))
    assert sum(strategy.output_scale) < strategy.buf_decay[0]
    n = 60
    column = strategy.coefficients(n)
    assert toeplitz.is_non_increasing(column) and column[-1] > 0
    decay, scale = strategy.inverse()
    np.testing.assert_allclose(decay, 1 - zeros, rtol=1e-10)
    assert np.all(scale < 0)
    dense = toeplitz.matrix(column, n)
    np.testing.assert_allclose(strategy.noise_matrix(n) @ dense, np.eye(n), atol=1e-12)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    decay=st.lists(st.floats(1e-3, 0.9999), min_size=1, max_size=6, unique_by=lambda x: 1 - x),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_positive_scales_have_an_inverse(decay, seed):
    scale = np.random.default_rng(seed).uniform(1e-6, 0.9 / len(decay), len(decay))
    strategy = blt.Blt(decay, scale)
    n = 40
    inverse = toeplitz.inverse_coefficients(strategy.coefficients(n), n)
    np.testing.assert_allclose(strategy.inverse_coefficients(n), inverse, rtol=1e-7, atol=1e-13)
    np.testing.assert_allclose(
        strategy.prefix_noise_variance(n), toeplitz.prefix_noise_variance(inverse), rtol=1e-9
    )


def test_streaming_equals_dense_algebra():
    n = 200
    dense = _PRODUCTION.strategy_matrix(n)
    examples.check_matrices(_PRODUCTION, n)
    np.testing.assert_allclose(_PRODUCTION.multiply(np.eye(n)), dense, atol=1e-14)
    np.testing.assert_allclose(
        _PRODUCTION.multiply_inverse(np.eye(n)), np.linalg.inv(dense), atol=1e-13
    )
    x = np.random.default_rng(1).normal(size=(n, 3, 2))
    back = _PRODUCTION.multiply_inverse(_PRODUCTION.multiply(x))
    np.testing.assert_allclose(back, x, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        _PRODUCTION,
        blt.Blt([0.9], [0.8]),
        blt.Blt([0.5, 0.1], [0.6, 0.4]),  # c_1 = 1 = c_0
        blt.Blt([0.9, 0.3], [0.7, 0.9]),  # c_1 > c_0: only a bound
        blt.Blt([0.99], [30.0]),
    ],
)
def test_sensitivity_against_every_pattern(strategy):
    for n, b, k in itertools.product([1, 2, 6, 12], [1, 2, 3, 5, 12], [1, 2, 3, 12]):
        schema = schema_lib.MinSep(n, b, k)
        truth = examples.worst(strategy.strategy_matrix(n), schema)
        sensitivity = strategy.sensitivity(schema)
        assert sensitivity.squared >= truth * (1 - 1e-13)
        if sensitivity.exact:
            assert sensitivity.squared == pytest.approx(truth, rel=1e-12)
        else:
            assert sum(strategy.output_scale) > 1 and "bound" in sensitivity.method


def test_coefficients_are_equation_2():
    column = _PRODUCTION.coefficients(50)
    theta, omega = np.array(_PRODUCTION.buf_decay), np.array(_PRODUCTION.output_scale)
    assert column[0] == 1
    for t in range(1, 50):
        assert column[t] == pytest.approx(float(np.sum(omega * theta ** (t - 1))), rel=1e-14)
    assert _PRODUCTION.coefficients(1).tolist() == [1.0]


def test_production_loss_is_close_to_the_optimum():
    """9.4313 against 9.4306, the optimum for (2000, 400, 5): see blt_optimize_test."""
    schema = schema_lib.MinSep(2000, 400, 5)
    assert _PRODUCTION.max_loss(schema) == pytest.approx(9.4313, abs=1e-4)


@pytest.mark.parametrize(
    "decay,scale,message",
    [
        ([], [], "at least one"),
        ([0.9], [0.1, 0.2], "one entry a buffer"),
        ([1.0], [0.1], "between 0 and 1"),
        ([0.0], [0.1], "between 0 and 1"),
        ([math.nan], [0.1], "between 0 and 1"),
        ([0.9], [-0.1], "positive"),
        ([0.9], [0.0], "Drop a buffer"),
        ([0.9], [math.inf], "finite"),
        ([0.9, 0.9], [0.1, 0.1], "merge"),
        ([1e-3, 1e-3 * (1 + 2e-16)], [0.1, 0.1], "merge"),
        ("ab", [0.1, 0.2], "numbers"),
    ],
)
def test_bad_parameters_are_refused(decay, scale, message):
    with pytest.raises(ValueError, match=message):
        blt.Blt(decay, scale)


def test_buffers_are_in_the_order_of_their_decays():
    strategy = blt.Blt([0.5, 0.9], [0.1, 0.2])
    assert (strategy.buf_decay, strategy.output_scale) == ((0.9, 0.5), (0.2, 0.1))
