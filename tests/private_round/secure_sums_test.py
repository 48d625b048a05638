"""Secure sums by themselves, against NumPy."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import secure_sums

_SHAPES = ((7,), (), (3, 2))
_DIM = 14
_CLIP_NORM = 2.0
_ENCODING = grid.for_bits(_DIM, 5, 16)
_VECTOR_SUM = secure_sums.VectorSum(_ENCODING, _CLIP_NORM, rotation_seed=5)


def _update(seed):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in _SHAPES]


def _flat(update):
    return np.concatenate([np.ravel(x).astype(np.float64) for x in update])


def _clipped(update):
    flat = _flat(update)
    return flat * min(1, _CLIP_NORM / np.linalg.norm(flat))


def _margin(num_clients):
    # Six standard errors of the rounding, and float32's.
    stddev = _ENCODING.rounding_stddev_bound(_CLIP_NORM, num_clients)
    return 6 * stddev + 2e-5 * _CLIP_NORM * num_clients


def _total(sent, moduli):
    """Sums modulo the moduli; without clients each sum is 0."""
    sizes = {"vector": _ENCODING.padded_dim}
    return {
        name: tf.constant(
            sum(
                (np.asarray(one[name], np.int64) for one in sent),
                np.zeros([sizes[name]] if name in sizes else [], np.int64),
            )
            % modulus,
            tf.int32,
        )
        for name, modulus in moduli.items()
    }


def _sum(updates, state=None):
    round_seed, state = _VECTOR_SUM.start_round(state or _VECTOR_SUM.initial_state())
    sent = [_VECTOR_SUM.encode(update, round_seed) for update in updates]
    tensors, count = _VECTOR_SUM.decode(_total(sent, _VECTOR_SUM.moduli), round_seed, _SHAPES)
    return tensors, count, state


@pytest.mark.parametrize("num_clients", [0, 1, 3, 5])
def test_sum_of_clipped_updates(num_clients):
    updates = [_update(i) for i in range(num_clients)]
    tensors, count, state = _sum(updates)
    expected = sum(map(_clipped, updates), np.zeros(_DIM))
    assert np.max(np.abs(_flat(tensors) - expected)) <= (_margin(num_clients) if num_clients else 0)
    assert count == num_clients and state.round_index == 1
    assert all(tensor.dtype == tf.float64 for tensor in tensors)
    assert tuple(tuple(tensor.shape) for tensor in tensors) == _SHAPES


def test_more_clients_than_the_modulus_is_sized_for():
    with pytest.raises(tf.errors.InvalidArgumentError, match="max_clients"):
        _sum([_update(i) for i in range(6)])


def test_a_client_that_is_not_finite_counts_as_zero():
    bad = [_update(1)[0] * math.nan, *_update(1)[1:]]
    assert np.max(np.abs(_flat(_sum([_update(0), bad])[0]) - _clipped(_update(0)))) <= _margin(1)


def test_repeated_round_is_the_same_and_the_next_one_is_rotated_anew():
    updates = [_update(i) for i in range(4)]
    first, _, state = _sum(updates)
    second, _, last = _sum(updates, state)
    np.testing.assert_array_equal(_flat(first), _flat(_sum(updates)[0]))
    assert np.mean(_flat(first) == _flat(second)) < 0.5
    np.testing.assert_array_equal(state.rotation_seed, last.rotation_seed)


def test_rotation_seeds_are_fresh():
    vector_sum = secure_sums.VectorSum(_ENCODING, _CLIP_NORM)
    first, second = vector_sum.initial_state(), vector_sum.initial_state()
    assert np.all(first.rotation_seed != second.rotation_seed)


@pytest.mark.parametrize("has_noise", [False, True])
def test_half_bits_are_summed_exactly(has_noise):
    half_bits = secure_sums.HalfBitSum(has_noise)

    def summed(bits, noise=0):
        total = _total([half_bits.encode(tf.constant(bit)) for bit in bits], half_bits.moduli)
        total["doubled"] = (total["doubled"] + noise) % secure_sums.COUNT_MODULUS
        return half_bits.decode(total)

    for bits in ([], [0.5], [-0.5] * 4, [0.5, -0.5, 0.0, 0.5, 0.5]):
        assert summed(bits) == sum(bits)
    # No client counts for more, whatever it sends.
    for bad, counts_as in ((7.0, 0.5), (-math.inf, -0.5), (math.inf, 0.5), (math.nan, 0.0)):
        assert summed([bad]) == counts_as
    if has_noise:
        assert summed([-0.5, -0.5], noise=-7) == -4.5


def test_bad_arguments():
    with pytest.raises(ValueError, match="clip_norm"):
        secure_sums.VectorSum(_ENCODING, 0.0)
    with pytest.raises(ValueError, match="rotation_seed"):
        secure_sums.VectorSum(_ENCODING, 1.0, rotation_seed=-1)
    with pytest.raises(ValueError, match="dim=13"):
        _VECTOR_SUM.encode([tf.zeros([13])], tf.constant([1, 2], tf.int64))
