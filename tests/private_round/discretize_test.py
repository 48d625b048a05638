"""Tests of encoding and decoding, against enumeration and exact integer arithmetic."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import discretize

_CLIP_NORM = 0.5
_SEED = tf.constant([2, 71], tf.int64)
_FLOAT32_ERROR = 1e-5  # Of the norm: clipping short of it, and the two transforms.


def _seed(index):
    return tf.constant([index, 8], tf.int64)


def _clipped(x, clip_norm=_CLIP_NORM):
    x = np.asarray(x, np.float64)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    return x * np.minimum(1, clip_norm / np.where(norms > 0, norms, 1))


def _round_trip(updates, encoding, seed=_SEED):
    """Encodes, sums modulo M with Python integers' semantics, decodes; checks the range."""

    def encode(x):
        return discretize.encode(x, seed, encoding, _CLIP_NORM)

    updates = tf.constant(updates, tf.float32)
    if len(updates) > 20:  # Worth the tracing.
        encode_all = tf.function(lambda batch: tf.map_fn(encode, batch, tf.int32))
        encoded = encode_all(updates).numpy().astype(np.int64)
    else:
        encoded = np.array([encode(x) for x in updates], np.int64)
    assert encoded.min() >= 0 and encoded.max() <= 2 * encoding.max_coordinate
    centred = encoded - encoding.max_coordinate
    assert np.max(np.sum(centred**2, axis=1)) <= encoding.max_squared_norm
    assert len(updates) <= encoding.max_clients
    total = np.sum(encoded, axis=0)
    assert total.max() < encoding.modulus  # It did not wrap around.
    total = tf.constant(total % encoding.modulus, tf.int32)
    return discretize.decode(total, tf.constant(len(updates)), seed, encoding, _CLIP_NORM).numpy()


@pytest.mark.parametrize("num_clients", [1, 2, 100, pytest.param(6500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [1, 40, 64])
def test_round_trip_is_the_sum_within_the_rounding_error(num_clients, dim):
    encoding = grid.for_bits(dim, num_clients, 24)
    updates = np.random.default_rng(dim).normal(size=(num_clients, dim)) / math.sqrt(dim)
    updates *= np.linspace(0.01, 3, num_clients)[:, None]
    error = _round_trip(updates, encoding) - np.sum(_clipped(updates), axis=0)
    # Each coordinate's error is sub-Gaussian with this standard deviation or less.
    stddev = encoding.rounding_stddev_bound(_CLIP_NORM, num_clients)
    assert np.max(np.abs(error)) < 6 * stddev + _FLOAT32_ERROR * _CLIP_NORM * num_clients
    # Power: the margin is far below the sum itself.
    assert 6 * stddev < 0.05 * _CLIP_NORM * math.sqrt(num_clients)


def test_rounding_error_is_what_the_grid_says():
    # With fine fractions the variance of a rounding is uniform over p(1 − p): 1/6 on average.
    dim, num_clients = 4096, 50
    encoding = grid.for_bits(dim, num_clients, 14)
    updates = np.random.default_rng(1).normal(size=(num_clients, dim))
    error = _round_trip(updates, encoding) - np.sum(_clipped(updates), axis=0)
    mean_square = np.mean(error**2) / encoding.granularity(_CLIP_NORM) ** 2 / num_clients
    # The square of a sum of 50 errors is nearly that of a Gaussian, of variance 2.
    assert mean_square == pytest.approx(1 / 6, rel=6 * math.sqrt(2 / dim))


def test_worst_case_sum_fills_the_modulus_without_wrapping():
    # All clients send a vector that the rotation turns into one spike: coordinates at ±C_∞.
    dim, num_clients = 64, 300
    encoding = grid.for_bits(dim, num_clients, 16)
    spike = tf.one_hot(3, dim) * 10.0
    from_spike = discretize.walsh_hadamard.unrotate(
        spike, discretize.seeds.derive(_SEED, 0)
    ).numpy()
    for sign in (1, -1):
        updates = np.tile(sign * from_spike, (num_clients, 1))
        total = _round_trip(updates, encoding)
        np.testing.assert_allclose(total, np.sum(_clipped(updates), axis=0), rtol=0.01)


def test_no_clients():
    encoding = grid.for_bits(10, 5, 12)
    total = discretize.decode(tf.zeros([16], tf.int32), tf.constant(0), _SEED, encoding, _CLIP_NORM)
    np.testing.assert_array_equal(total, np.zeros(10))


@pytest.mark.parametrize("norm", [1.5, pytest.param(2.5, marks=pytest.mark.slow)])
def test_conditional_mean_by_enumeration(norm):
    # Empirical means of accepted roundings against the exact conditional mean.
    dim, alpha, num_draws = 6, 0.9, 20_000
    encoding = grid.GridEncoding(dim, 1, norm, alpha)
    x = np.array([0.5, 0.5, -0.5, 0.6, 0.45, -0.3])
    x *= norm / np.linalg.norm(x)
    ups = np.array(list(itertools.product((0, 1), repeat=dim)))
    fraction = x - np.floor(x)
    probability = np.prod(np.where(ups, fraction, 1 - fraction), axis=1)
    roundings = np.floor(x) + ups
    accepted = np.sum(roundings**2, axis=1) <= encoding.max_squared_norm
    probability = np.where(accepted, probability, 0)
    assert 0.1 < np.sum(probability) < 0.99  # Some are rejected.
    mean = probability @ roundings / np.sum(probability)

    @tf.function
    def draw():
        def one(i):
            seed = tf.stack([tf.constant(9, tf.int64), i])
            return discretize.round_conditionally(
                tf.constant(x, tf.float32), seed, encoding.max_squared_norm
            )

        indices = tf.range(num_draws, dtype=tf.int64)
        return tf.map_fn(one, indices, fn_output_signature=tf.int32, parallel_iterations=100)

    drawn = draw().numpy()
    assert np.max(np.sum(drawn.astype(np.int64) ** 2, axis=1)) <= encoding.max_squared_norm
    margin = 6 * 0.5 / math.sqrt(num_draws)
    assert np.max(np.abs(np.mean(drawn, axis=0) - mean)) < margin
    # Power: rounding to the nearest integer would be off by more.
    assert np.max(np.abs(np.round(x) - mean)) > 5 * margin
    # The bias of conditioning keeps within its bound.
    assert np.linalg.norm(mean - x) <= encoding.rounding_bias_bound


def test_rounding_that_is_never_accepted():
    x = tf.constant([0.75, -0.75, 1.5])
    # Roundings have squared norm at least 1; truncation has exactly 1.
    truncated = discretize.round_conditionally(tf.constant([0.999999] * 50), _SEED, 3)
    np.testing.assert_array_equal(truncated, np.zeros(50))
    np.testing.assert_array_equal(discretize.round_conditionally(x, _SEED, 0), [0, 0, 0])
    for index in range(20):
        rounded = discretize.round_conditionally(x, _seed(index), 1).numpy()
        assert np.sum(rounded**2) <= 1


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.full(1000, 2**20 + 1), id="a sum of 50 bits, where float32 would not tell"),
        pytest.param(np.random.default_rng(0).integers(-1000, 1000, 3 << 20), id="in parts"),
    ],
)
def test_norm_test_is_exact(x):
    squared = int(np.sum(x**2))
    assert discretize.has_norm_at_most(tf.constant(x, tf.int32), squared)
    assert not discretize.has_norm_at_most(tf.constant(x, tf.int32), squared - 1)


@pytest.mark.parametrize("scaled_clip_norm", [0.3, 3.0, 50.0, 1e5, 3e6])
@pytest.mark.parametrize(
    "alpha", [0.01, pytest.param(math.exp(-0.5), marks=pytest.mark.slow), 0.99]
)
def test_adversarial_inputs_keep_the_norm_bound(scaled_clip_norm, alpha):
    dim = 128
    encoding = grid.GridEncoding(dim, 16, scaled_clip_norm, alpha)
    half = np.full(dim, 0.5) * _CLIP_NORM / scaled_clip_norm
    rows = [
        half,
        half * 1.0001,
        np.full(dim, _CLIP_NORM / math.sqrt(dim)),
        np.eye(dim)[0] * _CLIP_NORM,
        np.eye(dim)[0] * 1e30,
        np.append(half[1:], 1e9),
        np.random.default_rng(0).normal(size=dim),
        np.random.default_rng(1).standard_cauchy(size=dim),
    ]
    # Undo the rotation, so that the rounding sees exactly these.
    rotation = discretize.seeds.derive(_SEED, 0)
    rows += [discretize.walsh_hadamard.unrotate(tf.constant(r, tf.float32), rotation) for r in rows]
    _round_trip(np.stack(rows), encoding)


def test_full_norm_vectors_are_accepted_as_the_theory_says():
    # Vectors at the clip norm on a very fine grid, where float32 errors could tip the test.
    dim = 2**14
    encoding = grid.GridEncoding(dim, 1, 3e6)
    for index in range(20):
        x = np.random.default_rng(index).normal(size=dim).astype(np.float32)
        error = _round_trip(x[None], encoding, _seed(index)) - _clipped(x)
        # Truncation would bias towards zero and have three times this mean square.
        mean_square = np.mean(error**2) / encoding.granularity(_CLIP_NORM) ** 2
        short_of_bound = (_FLOAT32_ERROR * 3e6) ** 2 / dim
        assert mean_square < 1 / 4 + 1.5 * short_of_bound


@pytest.mark.parametrize(
    "entries",
    [
        [0.0, 0.0, 0.0],
        [-0.0, 0.0, 0.0],
        [3e38, -3e38, 3e38],
        [3e38, 1.0, 1e-40],
        [1e-40, -1e-42, 1e-45],
        [1e-38, 1e-38, 0.0],
        [1e-20, 0.0, 1e-25],
    ],
)
def test_extreme_magnitudes(entries):
    encoding = grid.for_bits(3, 1, 20)
    error = _round_trip(np.array([entries]), encoding)[:3] - _clipped(entries)
    bound = 2 * encoding.granularity(_CLIP_NORM) + _FLOAT32_ERROR * 2 * _CLIP_NORM
    assert np.linalg.norm(error) < bound


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 4, 9])
def test_non_finite_clients_count_as_zero(bad, position):
    encoding = grid.for_bits(10, 1, 20)
    x = np.ones(10)
    x[position] = bad
    np.testing.assert_array_equal(_round_trip(x[None], encoding), np.zeros(10))


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.sampled_from([6, 12, 20]),
    st.integers(0, 1000),
)
def test_any_vector_is_decoded_within_the_error_bound(entries, bits, seed):
    encoding = grid.for_bits(len(entries), 2, bits)
    decoded = _round_trip(np.array([entries]), encoding, _seed(seed))
    clipped = _clipped(entries) if np.all(np.isfinite(entries)) else np.zeros(len(entries))
    # No coordinate moves by a whole grid step, and dims up to 64 have no ℓ∞ clipping.
    bound = math.sqrt(encoding.padded_dim) * encoding.granularity(_CLIP_NORM)
    assert np.linalg.norm(decoded - clipped) <= bound + _FLOAT32_ERROR * 2 * _CLIP_NORM


def test_same_round_same_integers_and_next_round_new_ones():
    encoding = grid.for_bits(100, 3, 12)
    x = tf.constant(np.random.default_rng(0).normal(size=100), tf.float32)
    first = discretize.encode(x, _SEED, encoding, _CLIP_NORM)
    np.testing.assert_array_equal(first, discretize.encode(x, _SEED, encoding, _CLIP_NORM))
    other = discretize.encode(x, _SEED + 1, encoding, _CLIP_NORM)
    assert np.mean(first.numpy() == other.numpy()) < 0.5


def test_different_clients_round_independently():
    # Nearly equal updates have nearly equal fractions, but draws of their own.
    dim = 4096
    encoding = grid.for_bits(dim, 3, 12)
    x = np.random.default_rng(0).normal(size=dim).astype(np.float32)
    x *= 0.5 * _CLIP_NORM / np.linalg.norm(x)
    errors = []
    for shift in (0, 1e-6):
        errors.append(_round_trip((x * (1 + shift))[None], encoding) - x)
    correlation = np.corrcoef(errors)[0, 1]
    assert abs(correlation) < 6 / math.sqrt(dim)


def test_coordinates_beyond_the_bound_are_scaled_down():
    x = tf.constant([10.0, -3.0, 1.0])
    limited = discretize.limit_coordinates(x, 5).numpy()
    np.testing.assert_allclose(limited, [5, -1.5, 0.5])
    np.testing.assert_array_equal(discretize.limit_coordinates(x, 10), x)
    np.testing.assert_array_equal(discretize.limit_coordinates(0 * x, 10), 0 * x)
    for index in range(50):
        x = tf.constant(np.random.default_rng(index).normal(size=7) * 100, tf.float32)
        assert np.max(np.abs(discretize.limit_coordinates(x, 7))) <= 7


def test_clients_use_no_float64():
    encoding = grid.for_bits(100, 3, 12)
    function = tf.function(lambda x, seed: discretize.encode(x, seed, encoding, _CLIP_NORM))
    concrete = function.get_concrete_function(
        tf.TensorSpec([100], tf.float32), tf.TensorSpec([2], tf.int64)
    )
    definition = concrete.graph.as_graph_def()
    nodes = list(definition.node)
    for library_function in definition.library.function:
        nodes += library_function.node_def
    assert len(nodes) > 20
    for node in nodes:
        for attribute in node.attr.values():
            assert attribute.type != tf.float64.as_datatype_enum, node.name
