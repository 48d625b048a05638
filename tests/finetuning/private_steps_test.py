"""Tests of steps on noised sums, on a model of one vector: what is claimed is what is computed."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.finetuning import clipped_sums, private_steps
from tff_dpftrl.mechanisms import blt, identity
from tff_dpftrl.private_round import clipping, fixed_clip, interface

_CLIP = 0.5
_EXPECTED = 4.0
_RATE = 0.1
_WEIGHT = np.array([1.0, -2.0, 3.0], np.float32)


def _losses(weights, rows):
    """½ ‖θ − x‖² of each row, whose gradient is θ − x."""
    return 0.5 * tf.reduce_sum(tf.square(weights[0] - rows), axis=1)


def _steps(noise_multiplier=0.0, *, normalised=False, strategy=None, seed=7, **options):
    private_round = fixed_clip.FixedClipRound(
        identity.Identity() if strategy is None else strategy,
        noise_multiplier=noise_multiplier,
        clipping=clipping.FlatClipping(options.pop("clip_norm", _CLIP)),
        clients_per_round=_EXPECTED,
        deterministic_seed=seed,
    )
    return private_steps.PrivateSteps(
        private_round,
        clipped_sums.looped(_losses),
        options.pop("optimizer", None) or tf.keras.optimizers.SGD(_RATE),
        [_WEIGHT],
        units_at_once=options.pop("units_at_once", 2),
        normalised=normalised,
        **options,
    )


def _data(num_rows):
    return np.random.default_rng(0).normal(scale=5.0, size=[num_rows, 3]).astype(np.float32)


def _step(steps, data, row_splits, state=None):
    state = steps.initial_state() if state is None else state
    return steps.step(state, np.array(row_splits), lambda begin, end: data[begin:end])


def _weight(state):
    (weight,) = state["global_model_weights"]["trainable"]
    return weight


def _clipped(gradient, clip_norm=_CLIP):
    return gradient * min(1.0, clip_norm / np.linalg.norm(gradient))


def test_a_step_is_the_sum_of_clipped_means_over_the_expected_number():
    data, splits = _data(5), [0, 2, 3, 5]
    state, units = _step(_steps(), data, splits)
    bounds = list(zip(splits, splits[1:], strict=False))
    means = [np.mean(_WEIGHT - data[a:b], axis=0) for a, b in bounds]
    total = sum(_clipped(mean) for mean in means)
    clipped_first = sum(
        np.mean([_clipped(_WEIGHT - row) for row in data[a:b]], axis=0) for a, b in bounds
    )
    np.testing.assert_allclose(units.norms, [np.linalg.norm(mean) for mean in means], rtol=1e-6)
    losses = _losses([_WEIGHT], data).numpy()
    np.testing.assert_allclose(units.losses, [losses[a:b].mean() for a, b in bounds], rtol=1e-6)
    # Over the four units expected, not the three that came: that would reveal how many did.
    np.testing.assert_allclose(_weight(state), _WEIGHT - _RATE * total / _EXPECTED, rtol=1e-5)
    for wrong in (total / 3, clipped_first / _EXPECTED):
        assert np.abs(_weight(state) - (_WEIGHT - _RATE * wrong)).max() > 1e-3


def test_without_noise_and_clipping_it_is_the_mean_gradient_of_the_expected_number():
    data = _data(6)
    state, _ = _step(_steps(clip_norm=1e6), data, np.arange(7))
    expected = np.sum(_WEIGHT - data, axis=0) / _EXPECTED
    np.testing.assert_allclose(_weight(state), _WEIGHT - _RATE * expected, rtol=1e-5)


def test_normalised_clipping_takes_the_clip_norm_out_of_the_step_and_the_noise():
    data, splits = _data(4), np.arange(5)
    plain, _ = _step(_steps(1.5), data, splits)
    normalised, _ = _step(_steps(1.5, normalised=True), data, splits)
    moved, moved_normalised = _weight(plain) - _WEIGHT, _weight(normalised) - _WEIGHT
    np.testing.assert_allclose(moved_normalised, moved / _CLIP, rtol=1e-4)


def test_an_empty_batch_releases_the_noise_of_its_round():
    steps = _steps(2.0)
    state = steps.initial_state()
    reference = fixed_clip.FixedClipRound(
        identity.Identity(),
        noise_multiplier=2.0,
        clipping=clipping.FlatClipping(_CLIP),
        clients_per_round=_EXPECTED,
        deterministic_seed=7,
    )
    private, weight, moves = reference.initial_state([[3]]), _WEIGHT, []
    for _ in range(2):
        private, (noise,), _ = reference.release(
            private, interface.Contribution([tf.zeros([3], tf.float64)])
        )
        state, units = _step(steps, _data(0), [0], state)
        assert len(units.norms) == len(units.losses) == 0
        moves.append(_weight(state) - weight)
        np.testing.assert_allclose(moves[-1], -_RATE * noise.numpy(), atol=1e-6)
        weight = _weight(state)
    assert np.abs(moves[0] - moves[1]).max() > 1e-3  # Never the same noise twice.


def _steps_of_many_weights():
    return private_steps.PrivateSteps(
        fixed_clip.FixedClipRound(
            identity.Identity(),
            noise_multiplier=3.0,
            clipping=clipping.FlatClipping(_CLIP),
            clients_per_round=_EXPECTED,
        ),
        clipped_sums.looped(_losses),
        tf.keras.optimizers.SGD(1.0),
        [np.zeros(20_000, np.float32)],
        units_at_once=2,
        normalised=False,
    )


def _empty_step(steps, state):
    rows = np.zeros([0, 20_000], np.float32)
    return steps.step(state, np.array([0]), lambda begin, end: rows)[0]


def test_the_noise_has_the_standard_deviation_that_is_promised():
    steps = _steps_of_many_weights()
    state = _empty_step(steps, steps.initial_state())
    # Five standard errors of a standard deviation, 1 / √(2 n) each.
    expected, tolerance = 3.0 * _CLIP / _EXPECTED, 5 / np.sqrt(2 * 20_000)
    assert abs(np.std(_weight(state)) / expected - 1) < tolerance


def test_branches_of_a_state_have_independent_noise():
    steps = _steps_of_many_weights()
    state = _empty_step(steps, steps.initial_state())
    one, other = (_weight(_empty_step(steps, state)) - _weight(state) for _ in range(2))
    expected, tolerance = np.sqrt(2.0) * 3.0 * _CLIP / _EXPECTED, 5 / np.sqrt(2 * 20_000)
    for combined in (one - other, one + other):
        assert abs(np.std(combined) / expected - 1) < tolerance


def test_every_private_run_draws_a_seed_of_its_own():
    steps = _steps(1.0, seed=None)
    seeds = {tuple(steps.initial_state()["aggregator"].seed.numpy()) for _ in range(3)}
    assert len(seeds) == 3


_OPTIMIZERS = [
    "Adam",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("SGD", "AdamW", "Adafactor")),
]


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_a_step_is_a_function_of_its_state(optimizer):
    data, splits = _data(6), [0, 1, 4, 6]

    def made():
        chosen = getattr(tf.keras.optimizers, optimizer)(0.05)
        return _steps(1.0, optimizer=chosen, learning_rate=lambda step: 0.05 / (step + 1))

    steps = made()
    before = steps.initial_state()
    first, _ = _step(steps, data, splits, before)
    second, _ = _step(steps, data, splits, first)
    # Repeated after a crash, by the same object and by another one.
    for again in (steps, made()):
        repeated, _ = _step(again, data, splits, first)
        tf.nest.map_structure(np.testing.assert_array_equal, repeated, second)
    assert np.abs(_weight(first) - _weight(second)).max() > 0
    np.testing.assert_array_equal(_weight(before), _WEIGHT)
    tf.nest.map_structure(np.testing.assert_array_equal, steps.initial_state(), before)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_steps_by_tensors_have_the_bits_of_all_together(optimizer, monkeypatch, caplog):
    shapes = ([3], [], [4, 2], [3], [1], [2], [4])

    def losses(weights, rows):
        total = tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in weights])
        return total * tf.reduce_sum(rows, axis=1)

    def run(large):
        monkeypatch.setattr(private_steps, "_LARGE", large)
        steps = private_steps.PrivateSteps(
            fixed_clip.FixedClipRound(
                identity.Identity(),
                noise_multiplier=1.0,
                clipping=clipping.FlatClipping(_CLIP),
                clients_per_round=_EXPECTED,
                deterministic_seed=7,
            ),
            clipped_sums.looped(losses),
            getattr(tf.keras.optimizers, optimizer)(0.05),
            [np.ones(shape, np.float32) for shape in shapes],
            units_at_once=2,
        )
        state = steps.initial_state()
        for _ in range(3):
            state, _ = _step(steps, _data(3), [0, 1, 2, 3], state)
        return state

    by_tensors = run(1)
    assert "retracing" not in caplog.text  # Whatever the number of shapes.
    tf.nest.map_structure(np.testing.assert_array_equal, by_tensors, run(10**9))


def test_an_interrupt_between_tensors_changes_no_state(monkeypatch):
    monkeypatch.setattr(private_steps, "_LARGE", 1)
    steps, data = _steps(1.0, optimizer=tf.keras.optimizers.Adam(_RATE)), _data(4)
    before, _ = _step(steps, data, [0, 1, 4])
    expected, _ = _step(steps, data, [0, 2, 4], before)
    apply = steps._optimizer.apply_gradients

    def interrupted(pairs):
        apply(pairs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps._optimizer, "apply_gradients", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _step(steps, data, [0, 2, 4], before)
    again, _ = _step(steps, data, [0, 2, 4], before)
    tf.nest.map_structure(np.testing.assert_array_equal, again, expected)


def test_pieces_of_a_batch_add_up():
    data, splits = _data(9), [0, 1, 4, 4, 6, 9]
    whole, _ = _step(_steps(1.0, units_at_once=100), data, splits)
    pieces, units = _step(_steps(1.0, units_at_once=1), data, splits)
    np.testing.assert_allclose(_weight(pieces), _weight(whole), rtol=1e-6)
    assert len(units.norms) == 5 and units.norms[2] == 0.0


def test_the_average_is_of_the_steps_models_without_the_first_one():
    steps, data, decay = _steps(1.0, iterate_averaging=0.5), _data(3), 0.5
    state, models = steps.initial_state(), []
    for _ in range(3):
        state, _ = _step(steps, data, np.arange(4), state)
        models.append(_weight(state))
    shares = np.array([decay**2, decay, 1.0])
    expected = np.tensordot(shares / shares.sum(), np.stack(models), axes=1)
    np.testing.assert_allclose(state["finalizer"]["average"][0], expected, rtol=1e-5)


def test_correlated_noise_is_that_of_its_strategy():
    strategy = blt.Blt([0.9], [0.3])
    steps, num_steps = _steps(1.0, strategy=strategy), 4
    plain = _steps(1.0)
    state, other, found, draws = steps.initial_state(), plain.initial_state(), [], []
    weight, other_weight = _WEIGHT, _WEIGHT
    for _ in range(num_steps):
        state, _ = _step(steps, _data(0), [0], state)
        other, _ = _step(plain, _data(0), [0], other)
        found.append(_weight(state) - weight)
        draws.append(_weight(other) - other_weight)
        weight, other_weight = _weight(state), _weight(other)
    # The same draws z, correlated by C⁻¹ as a matrix.
    expected = np.linalg.inv(strategy.strategy_matrix(num_steps)) @ np.stack(draws)
    np.testing.assert_allclose(np.stack(found), expected, atol=2e-6)
