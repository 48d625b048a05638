"""Sums of updates around a private round, in the clear and by secure sums."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import (
    adaptive_clipping,
    aggregation,
    clipping,
    estimators,
    fixed_clip,
    sampled_gaussian,
    secure_sums,
)

_SHAPES = [[2, 3], [4]]
_CLIP_NORM, _CLIENTS = 2.0, 3
_ENCODING = grid.for_bits(10, 8, 20)
_COMMON = {"clients_per_round": _CLIENTS, "deterministic_seed": 7}
_ADAPTIVE = adaptive_clipping.AdaptiveClipping(
    initial_clip_norm=_CLIP_NORM, clipped_count_stddev=1.0, only_estimates=True
)


def _fixed(noise_multiplier=0.5, **options):
    return fixed_clip.FixedClipRound(
        identity.Identity(),
        clipping=clipping.FlatClipping(_CLIP_NORM),
        noise_multiplier=noise_multiplier,
        **_COMMON | options,
    )


def _adaptive(**options):
    return adaptive_clipping.AdaptiveClipRound(
        identity.Identity(), clipping=_ADAPTIVE, noise_multiplier=0.5, **_COMMON | options
    )


def _updates(*norms):
    rng = np.random.default_rng(1)
    for norm in norms:
        update = [rng.normal(size=shape) for shape in _SHAPES]
        scale = norm / np.sqrt(sum(np.sum(one**2) for one in update))
        yield [tf.constant(scale * one, tf.float32) for one in update]


def _run(made, updates):
    """Runs a round; returns the states before and after it, the average and measurements."""
    state = made.initial_state(_SHAPES)
    seen = made.broadcast(state)
    sent = [made.contribute(update, seen, tf.constant(1, tf.int64)) for update in updates]
    plain = tf.nest.map_structure(lambda *each: sum(each), *(one for one, _ in sent))
    secure = {
        name: {
            part: _modular_sum([one[name][part] for _, one in sent], modulus)
            for part, modulus in parts.items()
        }
        for name, parts in made.moduli.items()
    }
    return state, *made.release(state, plain, secure, _SHAPES)


def _modular_sum(values, modulus):
    total = sum(value.numpy().astype(np.int64) for value in values) % modulus
    return tf.constant(total, values[0].dtype)


@pytest.mark.parametrize("build", [_fixed, _adaptive])
def test_sums_in_the_clear_are_those_of_the_private_round(build):
    private_round = build()
    made = aggregation.Aggregation(private_round)
    updates = list(_updates(1.0, 3.0))
    state, after, average, measured = _run(made, updates)
    own = private_round.initial_state(_SHAPES)
    tf.nest.map_structure(np.testing.assert_array_equal, tuple(state[:-1]), tuple(own))
    seen = private_round.broadcast(own)
    clipped = [private_round.clip_client(one, seen, None)[0] for one in updates]
    wanted = private_round.release(own, private_round.total(clipped, _SHAPES))
    tf.nest.map_structure(
        np.testing.assert_array_equal, (tuple(after[:-1]), average, dict(measured)),
        (tuple(wanted[0]), wanted[1], dict(wanted[2])),
    )  # fmt: skip
    assert state.sum_state == () and not made.moduli


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_updates_that_are_not_finite_are_dropped_and_counted(bad):
    made = aggregation.Aggregation(_fixed(), report_non_finite_clients=True)
    good = list(_updates(1.0, 3.0))
    broken = [tf.fill(shape, tf.constant(bad)) for shape in _SHAPES]
    *_, average, measured = _run(made, [*good, broken])
    *_, wanted, others = _run(made, good)
    tf.nest.map_structure(np.testing.assert_array_equal, average, wanted)
    assert (measured["non_finite_clients"], others["non_finite_clients"]) == (1, 0)


def test_secure_sums_have_the_average_of_sums_in_the_clear_up_to_the_grid():
    private_round = _fixed(encoded_norm=_ENCODING.inflated_clip_norm(_CLIP_NORM))
    vector_sum = secure_sums.VectorSum(_ENCODING, _CLIP_NORM, rotation_seed=5)
    made = aggregation.Aggregation(private_round, vector_sum=vector_sum)
    updates = list(_updates(1.0, 3.0, 0.5))
    state, after, average, measured = _run(made, updates)
    *_, wanted, _ = _run(aggregation.Aggregation(private_round), updates)
    assert measured["summed_clients"] == 3
    for one, other in zip(average, wanted, strict=True):
        assert np.abs(one - other).max() < 10 * _ENCODING.granularity(_CLIP_NORM)
        assert not np.array_equal(one, other)
    # Each round has its own rotation.
    assert state.sum_state.round_index + 1 == after.sum_state.round_index
    seeds = [made.broadcast(one)["round_seed"].numpy().tolist() for one in (state, after)]
    assert seeds[0] != seeds[1]


def test_the_bits_of_adaptive_clipping_are_summed_securely_too():
    private_round = _adaptive(unit_inflation=_ENCODING.inflated_clip_norm(1.0))
    vector_sum = secure_sums.VectorSum(_ENCODING, 1.0, rotation_seed=5)
    made = aggregation.Aggregation(private_round, vector_sum=vector_sum)
    assert list(made.moduli) == ["update", "bit"]
    updates = list(_updates(1.0, 3.0, 0.5))
    *_, measured = _run(made, updates)
    *_, wanted = _run(aggregation.Aggregation(private_round), updates)
    for name in ("estimated_clip_norm", "unclipped_fraction"):
        assert float(measured[name]) == pytest.approx(float(wanted[name]), rel=1e-6)


def test_what_a_client_sends_securely_is_nowhere_in_the_clear():
    private_round = _adaptive(unit_inflation=_ENCODING.inflated_clip_norm(1.0))
    made = aggregation.Aggregation(
        private_round, vector_sum=secure_sums.VectorSum(_ENCODING, 1.0, rotation_seed=5)
    )
    seen = made.broadcast(made.initial_state(_SHAPES))
    (update,) = _updates(1.0)
    plain, secure = made.contribute(update, seen, tf.constant(1, tf.int64))
    assert not plain and {name: set(parts) for name, parts in secure.items()} == {
        "update": {"vector", "count"},
        "bit": {"doubled", "count"},
    }
    for name, parts in secure.items():
        for part, value in parts.items():
            assert np.all((value >= 0) & (value < made.moduli[name][part]))


@pytest.mark.parametrize(
    "private_round",
    [
        _fixed(),  # Of noise for the norm before the encoding.
        _adaptive(),
        sampled_gaussian.SampledGaussianRound(
            clipping=clipping.FlatClipping(_CLIP_NORM),
            noise_multiplier=0.5,
            estimator=estimators.FixedDenominator(0.5, 6),
        ),
    ],
)
def test_noise_that_does_not_cover_the_encoding_is_refused(private_round):
    vector_sum = secure_sums.VectorSum(_ENCODING, _CLIP_NORM)
    with pytest.raises(ValueError, match="must have noise for a contribution of norm 2."):
        aggregation.Aggregation(private_round, vector_sum=vector_sum)


def test_a_plain_mean_is_of_the_finite_updates_and_zero_without_clients():
    made = aggregation.PlainMean()
    broken = [tf.fill(shape, np.float32(np.nan)) for shape in _SHAPES]
    one, other = _updates(1.0, 30.0)
    *_, average, measured = _run(made, [one, other, broken])
    for mean, a, b in zip(average, one, other, strict=True):
        np.testing.assert_allclose(mean, (a + b) / 3, rtol=1e-6)
    assert not measured and made.initial_state(_SHAPES) == ()
    nothing = {"update": [tf.zeros(shape) for shape in _SHAPES], "clients": tf.constant(0)}
    _, average, _ = made.release((), nothing, {}, _SHAPES)
    assert not any(np.any(one) for one in average)


def test_noise_parties_need_secure_sums_to_add_their_noise_to():
    with pytest.raises(ValueError, match="noise_parties=2.*nobody would add any"):
        aggregation.Aggregation(_fixed(noise_parties=2))
