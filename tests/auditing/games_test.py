import numpy as np
import pytest

from tff_dpftrl.auditing import games, playing
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import aggregation, clipping, estimators, sampled_gaussian


@pytest.mark.parametrize("sizes", [[40, 60], [1, 30], [5]])
def test_canaries_are_unit_directions_without_a_common_coordinate(sizes):
    canaries = games.Canaries.over(sizes, at_most=10, seed=0)
    directions = np.stack([canaries.of(canary) for canary in range(canaries.number)])
    np.testing.assert_allclose(directions @ directions.T, np.eye(canaries.number), atol=1e-12)
    assert np.all(directions[:, canaries.quiet] == 0.0)


def test_a_small_tensor_has_room_for_some_canaries_only():
    canaries = games.Canaries.over([3, 40], at_most=10, seed=0)
    touched = [np.any(canaries.of(canary)[:3]) for canary in range(10)]
    assert canaries.number == 10 and sum(touched) == 3


def test_large_tensors_are_touched_by_all_canaries_and_keep_a_quiet_fifth():
    canaries = games.Canaries.over([40, 60], at_most=10, seed=0)
    for canary in range(10):
        direction = canaries.of(canary)
        assert np.any(direction[:40]) and np.any(direction[40:])
    assert len(canaries.quiet) >= 20


def test_projections_are_scalar_products():
    canaries = games.Canaries.over([20, 20], at_most=7, seed=3)
    released = np.random.default_rng(0).normal(size=40)
    expected = [canaries.of(canary) @ released for canary in range(canaries.number)]
    np.testing.assert_allclose(canaries.projections(released), expected, atol=1e-12)


@pytest.mark.parametrize("is_known", [False, True])
def test_noise_is_kept_of_some_coordinates_of_each_tensor_and_of_none_that_is_not_read(is_known):
    made = playing.of_aggregation(aggregation.PlainMean(), [[10_000], [40], [20_000]])
    player = playing.Player(made)
    canaries = games.Canaries.over(player.sizes, at_most=3, seed=0)
    mechanism = mechanism_lib.Mechanism(identity.Identity(), 1.0, 1.0, 1.0)
    played = games.play(
        player,
        games.GamePlan(np.array([1.0, 0.0]), canaries, num_runs=66, resume_at=None),
        mechanism if is_known else None,
        resumed=player,
        resume=lambda state: state,
        seed=0,
        progress=lambda sentence: None,
    )
    kept = [2000, 10, 2000] if is_known else [0, 0, 0]
    assert played.noise.shape == (64, 2, sum(kept))
    np.testing.assert_array_equal(np.bincount(played.tensor_of, minlength=3), kept)
    assert not np.any(played.noise)  # A plain mean has none, and canaries are elsewhere.


@pytest.mark.parametrize(
    "weight, signal", [(1.0, 0.25), pytest.param(4.0, 1.0, marks=pytest.mark.slow)]
)
def test_what_canaries_add_is_measured(weight, signal):
    sampled = aggregation.Aggregation(
        sampled_gaussian.SampledGaussianRound(
            clipping=clipping.FlatClipping(0.5),
            noise_multiplier=2.0,
            estimator=estimators.FixedDenominator(0.5, 10.0),
            weight_cap=4.0,
        )
    )
    player = playing.Player(playing.of_aggregation(sampled, [[40]]), weight)
    canaries = games.Canaries.over(player.sizes, at_most=5, seed=0)
    mechanism = mechanism_lib.Mechanism.of(sampled)
    found = games.measured_signal(player, player.initialize(), canaries, mechanism)
    assert found == pytest.approx(signal, abs=1e-4)
