"""Canaries among users, or examples, whose clipped gradients are summed in one place."""

import numpy as np
import pytest
import tensorflow as tf

from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tff_dpftrl.accounting import dp_fedavg
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import fine_tuning, training
from tff_dpftrl.finetuning import clipped_sums, ghost, private_steps
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.models import graph_uses
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import clipping, fixed_clip

_CLIP = 0.5
_RATE = 0.1
_EXPECTED = 4.0
_NUM_STEPS, _PROBABILITY, _DELTA = 10, 0.5, 1e-6
_WEIGHTS = [np.zeros([80, 50], np.float32), np.zeros([], np.float32)]


def _losses(weights, rows):
    return 0.5 * tf.reduce_sum(tf.square(weights[0][0] - rows), axis=1) + weights[1]


def _canaries():
    example = np.zeros([1, 50], np.float32)
    return fine_tuning.RowCanaries(_losses, _WEIGHTS, example, number=150, seed=3)


def _steps(canaries, noise_multiplier):
    return fine_tuning.Steps(
        private_steps.PrivateSteps(
            fixed_clip.FixedClipRound(
                identity.Identity(),
                noise_multiplier=noise_multiplier,
                clipping=clipping.FlatClipping(_CLIP),
                clients_per_round=_EXPECTED,
                deterministic_seed=None if noise_multiplier else 0,
            ),
            clipped_sums.looped(canaries.row_losses),
            tf.keras.optimizers.SGD(_RATE),
            _WEIGHTS,
            units_at_once=3,
            normalised=False,
        )
    )


def _users(step):
    """Two users, of one row and of two."""
    rows = np.random.default_rng(step).normal(size=[3, 50]).astype(np.float32)
    return rows[:1], rows[1:]


def _after(process, units):
    state = process.next(process.initialize(), units).state
    return process.get_model_weights(state).trainable


def test_a_canary_adds_its_direction_at_the_clip_norm_and_others_their_gradients():
    canaries = _canaries()
    process = _steps(canaries, 0.0)
    users = [canaries.real(user) for user in _users(0)]
    alone = _after(process, users)
    together = _after(process, [users[0], canaries.client(7), users[1], canaries.client(9, -1)])
    for sign, canary in ((1, 7), (-1, 9)):
        moved = [x - y for x, y in zip(together, alone, strict=True)]
        along = canaries.directions.project(moved)[canary]
        assert along == pytest.approx(sign * _RATE * _CLIP / _EXPECTED, rel=1e-4)
    assert np.all(_after(process, [])[0] == 0.0)


def test_canaries_are_refused_in_one_pass_over_many_units():
    canaries = _canaries()
    rows = tf.nest.map_structure(tf.constant, canaries.client(7))
    weights = [tf.TensorSpec(weight.shape, weight.dtype) for weight in _WEIGHTS]
    with pytest.raises(graph_uses.UnknownUseError, match="a gradient of its own"):
        ghost.booked_losses(canaries.row_losses, weights, rows, 2)


def test_users_move_the_model_as_without_canaries():
    canaries = _canaries()
    found = _after(_steps(canaries, 0.0), [canaries.real(user) for user in _users(1)])
    means = [-np.mean(user, axis=0) for user in _users(1)]
    # The second tensor's gradient is 1 for everybody.
    norms = [np.sqrt(np.sum(mean**2) + 1.0) for mean in means]
    total = sum(mean * _CLIP / norm for mean, norm in zip(means, norms, strict=True))
    np.testing.assert_allclose(found[0][0], -_RATE * total / _EXPECTED, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
# With a tenth of the noise one of the canaries' 75 guesses is wrong in a run of three.
@pytest.mark.parametrize(("noise", "is_violated"), [(1.0, False), (0.02, True)])
def test_an_audit_of_sampled_users(noise, is_violated):
    canaries = _canaries()
    epsilon = dp_fedavg.DpFedAvg(_PROBABILITY, 3.0, _NUM_STEPS).epsilon(_DELTA)
    report = training.audit_training(
        _steps(canaries, 3.0 * noise),
        canaries=canaries,
        claim=claim_lib.Claim(epsilon, _DELTA),
        schema=schema_lib.MinSep.unrestricted(_NUM_STEPS),
        cohorts=_users,
        game=training.CanaryGame(sampling_probability=_PROBABILITY, seed=0),
    )
    assert report.is_violated == is_violated
