"""What one client of 10⁴ moves a sum by: proven for float64, too much in float32."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import (
    adaptive_clipping,
    clipping,
    discretize,
    estimators,
    fixed_clip,
    sampled_gaussian,
    summation,
)

_NUM_CLIENTS = 10_000
_FLOAT32_UNIT_ROUNDOFF = 2.0**-24


def _added_up(vectors, dtype):
    """Sums rows one after the other in one dtype, as a server would."""
    return np.add.accumulate(np.asarray(vectors, dtype), axis=0)[-1]


def _change(vectors, position, dtype):
    """How far zeroing one row moves the computed sum."""
    zeroed = np.array(vectors)
    zeroed[position] = 0
    difference = np.float64(_added_up(vectors, dtype)) - np.float64(_added_up(zeroed, dtype))
    return np.linalg.norm(difference)


def _clipped(clip_norm, updates):
    """The contributions of clients, each clipped by the private round itself."""
    round_ = fixed_clip.FixedClipRound(
        identity.Identity(),
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping(clip_norm),
        clients_per_round=_NUM_CLIENTS,
    )
    first = tf.constant(0, tf.int64)
    rows = [round_.clip_client([tf.constant(x, tf.float32)], first)[0].update[0] for x in updates]
    assert all(row.dtype == tf.float64 for row in rows)
    return np.stack(rows)


def _relative_error(num_clients, unit_roundoff=2.0**-53):
    """The proof's bound on the rounding error in a client's effect on a sum, over the norm."""
    return 2 * num_clients**2 * unit_roundoff / (1 - num_clients * unit_roundoff)


@pytest.mark.parametrize("dim", [1, 4, 100])
def test_one_of_many_aligned_clients(dim):
    # All the same, so that the last addition is to a number 10⁴ times as large. The clip norm
    # is such that the contribution is above the middle between two float32 sums.
    ulp = 2.0 ** (math.floor(math.log2(_NUM_CLIENTS / math.sqrt(dim))) - 23)
    steps = math.floor(1 / math.sqrt(dim) / ulp) + 0.51
    clip_norm = steps * ulp * math.sqrt(dim) * (1 + 1e-5)
    row = _clipped(clip_norm, [9 * np.ones(dim)])
    assert np.linalg.norm(row) <= clip_norm * (1 - 0.9e-5)
    rows = np.tile(row, (_NUM_CLIENTS, 1))
    assert _change(rows, -1, np.float64) <= clip_norm
    assert _change(rows, -1, np.float32) > clip_norm * (1 + 1e-4)


@pytest.mark.parametrize("order", ["alternating", "first one half", "random"])
def test_one_of_many_cancelling_clients(order):
    # Partial sums of thousands of clip norms that cancel in the end, in awkward digits.
    dim, clip_norm = 30, math.pi / 3
    rng = np.random.default_rng(3)
    directions = [rng.normal(size=dim) for _ in range(20)]
    rows = _clipped(clip_norm, [d * 1e3 for d in directions] + [-d * 1e3 for d in directions])
    rows = np.concatenate([np.repeat(rows[:20], 250, axis=0), np.repeat(rows[20:], 250, axis=0)])
    if order == "alternating":
        rows = rows.reshape(2, -1, dim).swapaxes(0, 1).reshape(-1, dim)
    elif order == "random":
        rng.shuffle(rows)
    changes = {dtype: [] for dtype in (np.float32, np.float64)}
    for dtype, moved in changes.items():
        moved += [_change(rows, position, dtype) for position in range(0, len(rows), 1111)]
    assert max(changes[np.float64]) <= clip_norm
    # The margin is worth having: float32 uses it up.
    exact = np.linalg.norm(rows[0])
    error = {dtype: np.max(np.abs(np.array(moved) - exact)) for dtype, moved in changes.items()}
    assert error[np.float64] <= _relative_error(_NUM_CLIENTS) * clip_norm
    assert error[np.float32] > 1e4 * error[np.float64]


def test_margin_covers_the_proven_error_for_the_stated_number_of_clients():
    slack = 1 / ((1 - clipping.CLIP_MARGIN) * (1 + 1e-7)) - 1
    assert _relative_error(_NUM_CLIENTS) < 2.3e-8
    assert _relative_error(summation.MAX_CLIENTS) < slack
    assert _relative_error(2 * summation.MAX_CLIENTS) > slack
    # In float32 the same margin would cover a few clients only.
    assert _relative_error(100, _FLOAT32_UNIT_ROUNDOFF) > slack


def test_clipped_denominator_of_many_clients():
    # At the smallest divisor: aligned clients, then one that pulls the other way.
    estimator = estimators.ClippedDenominator(0.5, 2 * _NUM_CLIENTS)
    clip_norm = 1.1
    round_ = sampled_gaussian.SampledGaussianRound(
        clipping=clipping.FlatClipping(clip_norm), noise_multiplier=0.0, estimator=estimator
    )
    first = tf.constant(0, tf.int64)
    (one, weight), _ = round_.clip_client([tf.ones([7])], first, 1.0)
    total = _added_up(np.tile(one[0], (_NUM_CLIENTS, 1)), np.float64)
    weights = float(weight) * _NUM_CLIENTS
    state = round_.initial_state([(7,)])

    def estimate(update, weight):
        totals = sampled_gaussian.WeightedContribution([tf.constant(update)], tf.constant(weight))
        return round_.release(state, totals)[1][0].numpy()

    change = estimate(total - one[0].numpy(), weights + 1) - estimate(total, weights)
    bound = clip_norm * estimator.unit_sensitivity
    assert 0.99 * bound < np.linalg.norm(change) <= bound


def test_decoded_secure_sum_of_many_clients():
    # What is charged for one client, after decoding; in float32 it was exceeded by up to 5e-4.
    dim, clip_norm = 64, 1.0
    encoding = grid.for_bits(dim, _NUM_CLIENTS, 31)
    seed = tf.constant([4, 2], tf.int64)
    x = tf.constant(np.random.default_rng(0).normal(size=dim), tf.float32)
    one = discretize.encode(x, seed, encoding, clip_norm).numpy().astype(np.int64)

    def decoded(num_clients, extra):
        # `extra` clients send zeros: the middle of the range.
        total = num_clients * one + extra * encoding.max_coordinate
        total = tf.constant(total % encoding.modulus, tf.int32)
        num_clients = tf.constant(num_clients + extra)
        return discretize.decode(total, num_clients, seed, encoding, clip_norm)

    with_all, without_one = decoded(_NUM_CLIENTS, 0), decoded(_NUM_CLIENTS - 1, 1)
    assert with_all.dtype == tf.float64
    exact = np.linalg.norm(one - encoding.max_coordinate) * encoding.granularity(clip_norm)
    change = np.linalg.norm(with_all - without_one)
    assert abs(change / exact - 1) < grid.DECODING_ALLOWANCE / 100
    assert change <= encoding.inflated_clip_norm(clip_norm)
    # Rounded to float32, the same sums differ by more than the allowance covers.
    in_float32 = tf.cast(
        tf.cast(with_all, tf.float32) - tf.cast(without_one, tf.float32), tf.float64
    )
    assert abs(np.linalg.norm(in_float32) / exact - 1) > grid.DECODING_ALLOWANCE


@pytest.mark.parametrize("on_grid", [False, True])
def test_no_noise_is_added_to_complex_sums(on_grid):
    arguments = ([tf.zeros(2, tf.complex64)], [tf.zeros(2, tf.float64)], tf.constant(1.0), 1.0)
    with pytest.raises(ValueError, match="only floats.* got complex64: view it as real"):
        if on_grid:
            summation.noised_mean_on_grid(*arguments, 1.0)
        else:
            summation.noised_mean(*arguments)


def test_noised_mean_is_computed_in_float64():
    (mean,) = summation.noised_mean(
        [tf.constant([1e8], tf.float64)], [tf.constant([1.0])], tf.constant(0.25), 2.0
    )
    assert mean.dtype == tf.float64 and mean[0] == (1e8 + 0.25) / 2


@pytest.mark.parametrize("make", [fixed_clip.FixedClipRound, adaptive_clipping.AdaptiveClipRound])
def test_more_clients_than_the_proof_covers_are_refused(make):
    options = {"noise_multiplier": 1.0}
    if make is fixed_clip.FixedClipRound:
        options["clipping"] = clipping.FlatClipping(1.0)
    make(identity.Identity(), clients_per_round=summation.MAX_CLIENTS, **options)
    with pytest.raises(ValueError, match=r"clients_per_round .* at most 200000, got 200001"):
        make(identity.Identity(), clients_per_round=summation.MAX_CLIENTS + 1, **options)
