"""Secure noise is that of the strategy, lies on its grid without gaps, and bears attacks on floats.

The attack is that of Mironov 2012 and Jin et al. 2022: who knows what the sum can be asks which of
the sums, with any noise that the generator can draw, give the number that was released.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.numpy_noise import example_strategies
from tff_dpftrl import validation
from tff_dpftrl.mechanisms import banded_toeplitz, identity, inverse_banded, noise_recipe, restarts
from tff_dpftrl.numpy_noise import kernels, secure_draws
from tff_dpftrl.private_round import (
    adaptive_clipping,
    clipping,
    estimators,
    fixed_clip,
    interface,
    noise_stream,
    sampled_gaussian,
    seeds,
    summation,
)

_ROUNDS = 6
_SIZES = (5, 2)


def _root(seed: int) -> bytes:
    return secure_draws.seed_from_int(seed)


def _stream_rounds(stream, num_rounds, seed=7):
    root, buffer, noise = seeds.root_seed(seed, secure=True), stream.initial_buffer(), []
    step, seed = tf.function(stream.next, autograph=False), stream.initial_seed(root)
    for t in range(num_rounds):
        tensors, buffer = step(buffer, tf.constant(t, tf.int64), seed)
        noise.append(np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors]))
    return np.array(noise)


@pytest.mark.parametrize("name", example_strategies.NAMES)
def test_streams_have_the_noise_of_the_numpy_kernels(name):
    strategy = example_strategies.STRATEGIES[name]
    recipe = strategy.noise_recipe()
    noise = _stream_rounds(
        noise_stream.NoiseStream(recipe, [[5], [2]], index=3, secure=True), _ROUNDS
    )
    other = kernels.build(recipe)
    buffer = np.zeros([other.num_buffers, sum(_SIZES)])

    def draw(index):
        return np.concatenate(
            [
                secure_draws.normal(_root(7), [3, 0, position, index], size)
                for position, size in enumerate(_SIZES)
            ]
        )

    for t in range(_ROUNDS):
        expected, buffer = other.step(buffer, t, draw)
        # The other kernels have weights in float32: 2⁻²⁴ of each of few terms.
        np.testing.assert_allclose(noise[t], expected, rtol=0, atol=2e-5)
    assert noise.dtype == np.float64
    multiples = noise * 2.0**secure_draws.STEP_BITS
    np.testing.assert_array_equal(multiples, np.rint(multiples))


@pytest.mark.parametrize("name", ["identity", "vanilla-tree"])
def test_sums_of_draws_are_exact(name):
    strategy = example_strategies.STRATEGIES[name]
    assert noise_recipe.is_sum_of_draws(strategy.noise_recipe())
    stream = noise_stream.NoiseStream(strategy.noise_recipe(), [[5]], index=3, secure=True)
    noise = _stream_rounds(stream, 8)
    nodes = np.array([secure_draws.normal(_root(7), [3, 0, 0, leaf], 5) for leaf in range(8)])
    if name == "vanilla-tree":  # After 2^h rounds one node is left in the sum.
        top = 3 * noise_recipe.LEVEL_STRIDE
        nodes = [secure_draws.normal(_root(7), [3, 0, 0, top], 5)]
    np.testing.assert_array_equal(np.sum(noise, axis=0), np.sum(nodes, axis=0))
    assert not noise_recipe.is_sum_of_draws(example_strategies.STRATEGIES["tree"].noise_recipe())
    assert noise_recipe.is_sum_of_draws(
        restarts.Restarted(identity.Identity(), (0, 3)).noise_recipe()
    )


def _odd_share(noise: np.ndarray) -> float:
    return float(np.mean((noise * 2.0**secure_draws.STEP_BITS) % 2 == 1))


@pytest.mark.parametrize(
    "strategy",
    [
        banded_toeplitz.BandedToeplitz((0.5, 0.2)),
        inverse_banded.InverseBanded((2.0, -0.5)),
        example_strategies.STRATEGIES["tree"],
        example_strategies.STRATEGIES["blt"],
    ],
)
def test_rounding_a_weighted_draw_leaves_no_gaps(strategy):
    size = 4_000
    stream = noise_stream.NoiseStream(strategy.noise_recipe(), [[size]], secure=True)
    for noise in _stream_rounds(stream, 2):
        # The share of odd numbers among n has standard deviation 1 / (2 √n).
        assert abs(_odd_share(noise) - 0.5) < 3 / np.sqrt(size)
    # Of draws with weight 2, rounded before it, none is odd.
    assert _odd_share(2.0 * secure_draws.normal(_root(1), [0], size)) == 0.0


_SHAPES = [[300], [4, 5]]


def _rounds(secure_noise, **options):
    common = {"noise_multiplier": 1.5, "secure_noise": secure_noise, **options}
    starts = restarts.Restarted(example_strategies.STRATEGIES["blt"], (0, 2))
    estimator = estimators.FixedDenominator(0.5, 4)
    return {
        "fixed": fixed_clip.FixedClipRound(
            example_strategies.STRATEGIES["blt"],
            clipping=clipping.FlatClipping(0.7),
            clients_per_round=3,
            **common,
        ),
        "adaptive": adaptive_clipping.AdaptiveClipRound(
            starts,
            clients_per_round=3,
            clipping=adaptive_clipping.AdaptiveClipping(clipped_count_stddev=3.0),
            **common,
        ),
        "sampled": sampled_gaussian.SampledGaussianRound(
            clipping=clipping.FlatClipping(0.7), estimator=estimator, **common
        ),
    }


@pytest.mark.parametrize("name", ["fixed", "adaptive", "sampled"])
def test_rounds_release_the_sum_and_noise_of_the_stated_size(name):
    private_round = _rounds(True, deterministic_seed=3)[name]
    state = before = private_round.initial_state(_SHAPES)
    assert state.seed.shape == [4]
    totals = private_round.no_contribution(_SHAPES)
    totals = totals._replace(update=[tensor + 0.25 for tensor in totals.update])
    found = []
    for _ in range(3):
        skipped = private_round.skip(state, _SHAPES)
        state, average, measured = private_round.release(state, totals)
        assert tf.nest.flatten(skipped)[0] == tf.nest.flatten(state)[0]
        if name != "adaptive":
            tf.nest.map_structure(np.testing.assert_array_equal, skipped, state)
        divisor = 2.0 if name == "sampled" else 3.0
        released = np.concatenate([tensor.numpy().reshape(-1) for tensor in average])
        size = float(measured["noise_stddev"]) * (divisor if name == "sampled" else 1.0)
        found.append((released * divisor - 0.25) / size)
    size = float(private_round.release(before, totals)[2]["noise_stddev"])
    size *= divisor if name == "sampled" else 1.0
    # The variance of n Gaussians is within 6 √(2/n) of 1; correlated noise is larger or smaller.
    assert abs(np.var(found[0]) - 1) < 6 * np.sqrt(2 / 320)
    again = private_round.release(before, totals)[1]
    first = np.concatenate([tensor.numpy().reshape(-1) for tensor in again])
    np.testing.assert_allclose((first * divisor - 0.25) / size, found[0], rtol=1e-6, atol=1e-9)


def test_without_noise_the_mean_is_exact():
    private_round = _rounds(True, noise_multiplier=0.0)["fixed"]
    totals = interface.Contribution([tf.constant([0.75, -3.0], tf.float64)])
    average = private_round.release(private_round.initial_state([[2]]), totals)[1]
    np.testing.assert_array_equal(average[0], [0.25, -1.0])


def test_every_initialisation_has_its_own_256_bits():
    private_round = _rounds(True)["fixed"]
    drawn = [private_round.initial_state([[1]]).seed.numpy() for _ in range(3)]
    assert len({word for seed in drawn for word in seed.tolist()}) == 12


def test_the_noise_pays_for_rounding_the_sum():
    size, multiplier = 4_000_000, 2.0
    factor = summation.grid_inflation(multiplier, size)
    # σ is z times the sensitivity 1 and √d steps of 2⁻³² σ.
    stddev = multiplier * factor
    assert stddev == pytest.approx(multiplier * (1 + np.sqrt(size) * 2**-32 * stddev), rel=1e-12)
    assert 1 < factor < 1 + 1e-6
    with pytest.raises(validation.UsageError, match="too large for secure noise"):
        summation.grid_inflation(2.0**32, 1)


_SIZE = 2_000
_STDDEV = 0.7


def _possible(released: np.ndarray, total: float, dtype) -> np.ndarray:
    """Whether each number can be a sum `total`, and noise made of a float32, as `dtype`."""
    nearest = ((released - total) / _STDDEV).astype(np.float32)
    candidates = [nearest, np.nextafter(nearest, np.float32(99)), np.nextafter(nearest, -99)]
    return np.any([_noised(total, z, dtype) == released for z in candidates], axis=0)


def _noised(total, unit, dtype):
    total = tf.fill([len(unit)], tf.constant(total, tf.float64))
    (mean,) = summation.noised_mean(
        [total], [tf.constant(unit)], tf.constant(_STDDEV, tf.float64), 1.0
    )
    return mean.numpy().astype(dtype).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_attack_on_float32_noise_tells_sums_apart(dtype):
    private_round = fixed_clip.FixedClipRound(
        identity.Identity(),
        noise_multiplier=_STDDEV,
        clipping=clipping.FlatClipping(1.0),
        clients_per_round=1,
    )
    sums = interface.Contribution([tf.fill([_SIZE], tf.constant(0.3, tf.float64))])
    state = private_round.initial_state([[_SIZE]])
    released = private_round.release(state, sums)[1][0].numpy().astype(dtype).astype(np.float64)
    assert np.all(_possible(released, 0.3, dtype))
    # Each coordinate alone excludes the other sum with this probability.
    excluded = 1 - np.mean(_possible(released, 0.0, dtype))
    assert excluded > (0.9 if dtype == np.float64 else 0.02)


@pytest.mark.parametrize("total", [0.0, 0.3])
def test_the_attack_fails_on_secure_noise(total):
    private_round = fixed_clip.FixedClipRound(
        identity.Identity(),
        noise_multiplier=_STDDEV,
        clipping=clipping.FlatClipping(1.0),
        clients_per_round=1,
        secure_noise=True,
    )
    state = private_round.initial_state([[_SIZE]])
    sums = interface.Contribution([tf.fill([_SIZE], tf.constant(total, tf.float64))])
    released = private_round.release(state, sums)[1][0].numpy()
    step = _STDDEV * summation.grid_inflation(_STDDEV, _SIZE) * secure_draws.STEP
    multiples = np.rint(released / step)
    # What is released is an integer times the step, whatever the sum is, and every integer is the
    # sum and a possible draw: for each candidate, every coordinate.
    np.testing.assert_array_equal(multiples * step, released)
    for candidate in (0.0, 0.3):
        draws = multiples - np.rint(candidate / step)
        np.testing.assert_array_equal((np.rint(candidate / step) + draws) * step, released)
        assert np.max(np.abs(draws)) < 8 / secure_draws.STEP
        # The draws' low bits are uniform under both: n (n - 1) / 2 pairs of n meet in 8 bits as
        # often as of random ones, up to 6 standard deviations.
        counts = np.bincount(draws.astype(np.int64) & 255, minlength=256)
        chi_squared = np.sum((counts - _SIZE / 256) ** 2) / (_SIZE / 256)
        assert abs(chi_squared - 255) < 6 * np.sqrt(2 * 255)
    # The attack above, which looks for float32 noise, excludes neither sum nor both.
    excluded = [np.mean(~_possible(released, one, np.float64)) for one in (0.0, 0.3)]
    assert min(excluded) > 0.9
