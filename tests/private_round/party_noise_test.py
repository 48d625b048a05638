"""A noise party's noise is the server's, bit for bit with a common seed, and survives the grid."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import banded, blt, dense, identity, restarts, tree
from tff_dpftrl.private_round import (
    adaptive_clipping,
    clipping,
    discretize,
    fixed_clip,
    party_noise,
    seeds,
)

_SHAPES = [(30,), (4, 5)]
_DIM = 50
_CLIP = 2.0
_BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_DENSE = np.tril(1 / (1 + np.abs(np.subtract.outer(range(8), range(8)))))
_STRATEGIES = {
    "identity": identity.Identity(),
    "blt": _BLT,
    "banded": banded.Banded([[1.0, 0.0], *[[1.0, 0.5]] * 7]),
    "dense": dense.Dense(_DENSE),
    "dense at once": dense.Dense(_DENSE, rounds_at_once=3),
    "tree": tree.Tree(8),
    "vanilla tree": tree.Tree(8, variance_reduction=False),
    "tree with restarts": restarts.Restarted(tree.Tree(4), (0, 3, 6)),
    "blt with restarts": restarts.Restarted(_BLT, (0, 3, 5)),
}
_COMMON = {"noise_multiplier": 1.5, "clients_per_round": 4, "deterministic_seed": 7}
_SEED = seeds.root_seed(7).numpy()
_ROUND_SEED = np.array([3, 4])
_SETTINGS = adaptive_clipping.AdaptiveClipping(initial_clip_norm=0.5, clipped_count_stddev=1.0)


def _encoding(strategy, multiplier=1.5, num_parties=1):
    ratio = party_noise.noise_ratio(strategy, multiplier, 8, num_parties)
    return grid.for_bits(_DIM, 10, 24, noise_ratio=ratio)


def _fixed(strategy, encoding, **options):
    return fixed_clip.FixedClipRound(
        strategy,
        clipping=clipping.FlatClipping(_CLIP),
        encoded_norm=encoding.inflated_clip_norm(_CLIP),
        **_COMMON,
        **options,
    )


def _adaptive(strategy, encoding, **options):
    return adaptive_clipping.AdaptiveClipRound(
        strategy, clipping=_SETTINGS, unit_inflation=encoding.inflation, **_COMMON, **options
    )


def _made(kind, strategy):
    encoding = _encoding(strategy, 2.3 if kind is _adaptive else 1.5)
    round_ = kind(strategy, encoding)
    return round_, encoding, party_noise.PartyNoise(round_, _SHAPES, encoding)


def _flat(tensors):
    return np.concatenate([np.ravel(tensor) for tensor in tensors])


def _each(quick):
    """Marks all strategies but some as slow: each traces its graphs for seconds."""
    return [
        pytest.param(strategy, id=name, marks=[] if name in quick else [pytest.mark.slow])
        for name, strategy in _STRATEGIES.items()
    ]


@pytest.mark.parametrize("strategy", _each(["blt", "banded", "tree with restarts"]))
def test_the_bits_are_those_of_the_server_with_a_common_seed(strategy):
    round_, encoding, party = _made(_fixed, strategy)
    state, own = round_.initial_state(_SHAPES), party.initial_state(_SEED)
    for _ in range(5):
        state, average, _ = round_.release(state, round_.no_contribution(_SHAPES))
        noise, count_noise, own = party.draw(own, _SEED)
        stddev = round_.noise_multiplier * encoding.inflated_clip_norm(_CLIP)
        added = noise[:_DIM].numpy().astype(np.float64) * stddev / 4
        np.testing.assert_array_equal(_flat(average), added)
        # The rest is not 0: the padding has noise, too.
        assert np.all(noise[_DIM:] != 0)
        assert count_noise == 0
        vector, _ = party.encode(noise, count_noise, _ROUND_SEED)
        released = discretize.decode(
            tf.constant(vector, tf.int32), tf.constant(0), _ROUND_SEED, encoding, _CLIP
        )
        rounding = encoding.granularity(_CLIP) * np.sqrt(encoding.padded_dim) / 2
        assert np.linalg.norm(released.numpy() / 4 - added) <= rounding


@pytest.mark.parametrize(
    "name", ["blt with restarts", pytest.param("tree with restarts", marks=pytest.mark.slow)]
)
def test_the_count_of_adaptive_clipping_has_the_noise_of_the_server(name):
    round_, encoding, party = _made(_adaptive, _STRATEGIES[name])
    assert party.stddev == pytest.approx(
        round_.update_noise_multiplier * encoding.inflation * encoding.scaled_clip_norm
    )
    state, own = round_.initial_state(_SHAPES), party.initial_state(_SEED)
    for _ in range(5):
        active = float(state.clip.active)
        state, average, measured = round_.release(state, round_.no_contribution(_SHAPES))
        noise, count_noise, own = party.draw(own, _SEED)
        fraction = np.float32(count_noise.numpy().astype(np.float64) * 1.0 / 4 + 0.5)
        assert measured["unclipped_fraction"] == fraction
        added = noise[:_DIM].numpy().astype(np.float64)
        added *= round_.update_noise_multiplier * encoding.inflation * active
        np.testing.assert_allclose(_flat(average), added / 4, rtol=1e-12)
        _, doubled = party.encode(noise, count_noise, _ROUND_SEED)
        assert abs(doubled / 2 - count_noise.numpy()) <= 0.25


@pytest.mark.parametrize("strategy", _each(["blt with restarts"]))
def test_a_round_is_reached_from_any_state_before_it(strategy):
    _, _, party = _made(_adaptive, strategy)
    roots = np.random.default_rng(0).integers(2**63, size=(7, 4))
    state, rows, states = party.initial_state(_SEED), [], []
    for root in roots:
        states.append(state)
        noise, count, state = party.draw(state, root)
        rows.append((noise.numpy(), count.numpy()))
    for kept in (0, 2):
        for row in range(kept, 7):
            before = party.before_round(states[kept], row, lambda index: roots[index])
            noise, count, _ = party.draw(before, roots[row])
            np.testing.assert_array_equal(noise, rows[row][0])
            assert count == rows[row][1]
    with pytest.raises(ValueError, match="state is before round 6, after 5"):
        party.before_round(states[6], 5, lambda index: roots[index])


def test_clients_and_noise_are_decoded_together():
    encoding, clients = _encoding(_BLT), 7
    party = party_noise.PartyNoise(_fixed(_BLT, encoding), _SHAPES, encoding)
    noise, count, _ = party.draw(party.initial_state(_SEED), _SEED)
    vector, _ = party.encode(noise, count, _ROUND_SEED)
    updates = np.random.default_rng(0).normal(size=(clients, _DIM)).astype(np.float32)
    updates *= _CLIP / np.linalg.norm(updates, axis=1, keepdims=True)
    total = vector.copy()
    for update in updates:
        total += discretize.encode(tf.constant(update), _ROUND_SEED, encoding, _CLIP).numpy()
    total = tf.constant(total % encoding.sum_modulus, tf.int32)
    decoded = discretize.decode(total, tf.constant(clients), _ROUND_SEED, encoding, _CLIP)
    stddev = party.stddev * encoding.granularity(_CLIP)
    expected = updates.sum(0) + noise[:_DIM].numpy() * stddev
    np.testing.assert_allclose(decoded, expected, atol=clients * encoding.granularity(_CLIP))


def test_rotated_noise_has_the_promised_deviation_on_every_coordinate():
    dim = 40_000
    ratio = party_noise.noise_ratio(identity.Identity(), 1.5, 8)
    encoding = grid.for_bits(dim, 10, 24, noise_ratio=ratio)
    party = party_noise.PartyNoise(_fixed(identity.Identity(), encoding), [(dim,)], encoding)
    noise, count, _ = party.draw(party.initial_state(_SEED), _SEED)
    vector, _ = party.encode(noise, count, _ROUND_SEED)
    centred = discretize.to_centre(tf.constant(vector, tf.int32), encoding.sum_modulus)
    scaled = centred.numpy() / party.stddev
    # Six standard errors of the variance, and the law itself: padding has as much as the rest.
    for part in (scaled, np.array(noise[dim:])):
        assert abs(part.var() - 1) < 6 * np.sqrt(2 / part.size)
        assert scipy.stats.kstest(part, "norm").pvalue > 1e-3


@pytest.mark.parametrize("kind", [_fixed, _adaptive])
def test_secure_noise_is_that_of_the_server(kind):
    strategy = _STRATEGIES["blt with restarts"]
    encoding = _encoding(strategy, 2.3)
    round_ = kind(strategy, encoding, secure_noise=True)
    seed = seeds.root_seed(7, secure=True).numpy()
    party = party_noise.PartyNoise(round_, _SHAPES, encoding)
    state, own = round_.initial_state(_SHAPES), party.initial_state(seed)
    for _ in range(5):
        expected, *counts, state = round_.noise(state, _SHAPES)
        noise, count, own = party.draw(own, seed)
        assert noise.dtype == tf.float64
        np.testing.assert_array_equal(noise[:_DIM], _flat(expected))
        assert count == (counts[0] if counts else 0)
        vector, _ = party.encode(noise, count, _ROUND_SEED)
        assert 0 <= vector.min() <= vector.max() < encoding.sum_modulus


def test_the_seed_is_what_it_was_given():
    _, _, party = _made(_fixed, _BLT)
    state = party.initial_state(_SEED)
    one, other = (party.draw(state, np.array(root))[0] for root in ([1, 2], [2, 1]))
    assert not np.array_equal(one, other)


def test_a_model_of_another_size_is_refused():
    with pytest.raises(ValueError, match="encoding is for dim 50, and an update has 30"):
        party_noise.PartyNoise(_fixed(_BLT, _encoding(_BLT)), [(30,)], _encoding(_BLT))


def test_two_parties_need_more_room():
    one, two = _encoding(_BLT), _encoding(_BLT, num_parties=2)
    assert two.noise_ratio == pytest.approx(np.sqrt(2) * one.noise_ratio)
    assert two.scaled_clip_norm < one.scaled_clip_norm
