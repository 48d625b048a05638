"""Probes from one state: the statistics where a process cannot be replayed, and odd updates."""

import dataclasses

import numpy as np
import pytest

from tests.auditing import planted_bugs
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.auditing import playing, probes
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import aggregation, seeds


def _pairs(rng, noise, pairs=400, columns=64):
    return noise(rng, (pairs, columns)), noise(rng, (pairs, columns))


@pytest.mark.parametrize(
    "noise",
    [
        lambda rng, shape: rng.laplace(size=shape),
        # One scale a coordinate, and coordinates that are nearly equal.
        lambda rng, shape: rng.normal(size=shape) * np.geomspace(1.0, 1e3, shape[1]),
        lambda rng, shape: rng.normal(size=(shape[0], 1)) + 0.1 * rng.normal(size=shape),
    ],
)
def test_equal_laws_are_told_apart_no_more_often_than_said(noise):
    rng, level = np.random.default_rng(0), 0.05
    found = np.zeros(2)
    for _ in range(300):
        one, two = _pairs(rng, noise)
        found += [
            probes._means_apart(one, two) < level,
            probes._variances_apart(one, two) < level,
        ]
    # Five standard errors above 15 of 300.
    assert np.all(found <= 300 * level + 5.0 * np.sqrt(300 * level))


def test_other_means_and_other_spreads_are_told_apart():
    rng = np.random.default_rng(1)
    one, two = _pairs(rng, lambda rng, shape: rng.normal(size=shape))
    moved = two.copy()
    moved[:, 3] += 0.6
    assert probes._means_apart(one, moved) < 1e-3
    assert probes._variances_apart(one, 1.05 * two) < 1e-3
    # A coordinate without noise hides nothing, here or elsewhere.
    one[:, 0], moved[:, 0] = 1.0, 1.0
    assert probes._means_apart(one, moved) < 1e-3
    two[:, 0] = 1.0 + 1e-3
    assert probes._means_apart(one, two) < 1e-50


def test_the_stated_power_is_had():
    rng, trials, level, columns = np.random.default_rng(2), 400, 1e-3, 64
    shift = probes._detectable(trials, level / columns)
    found = 0
    for _ in range(200):
        one, two = _pairs(rng, lambda rng, shape: rng.normal(size=shape), trials, columns)
        two[:, 5] += shift
        found += probes._means_apart(one, two) < level
    assert found >= 190  # 198 expected; below 190 has a chance of 1e-5.


def _probes(aggregator, mechanism=None):
    player = playing.Player(playing.of_aggregation(aggregator, [[60], [4]]))
    mechanism = mechanism or mechanism_lib.Mechanism.of(aggregator)
    saved, _ = probes.saved_states(player, mechanism, [0])
    return probes.Probes(player, mechanism, saved, canary_norm=1e3, seed=0)


@pytest.mark.parametrize(
    "name",
    [
        "BLT, restarted",
        "adaptive",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("identity", "sampled", "tree", "inverse-banded", "banded")
        ),
    ],
)
def test_noise_that_follows_from_the_state_alone_is_found(monkeypatch, name):
    aggregator = planted_bugs.CORRECT[name].build()
    assert _probes(aggregator).round_executed_again().outcome == "consistent"
    monkeypatch.setattr(seeds, "of_execution", lambda run_seed, _: run_seed)
    found = _probes(aggregator)
    assert found.is_replayable()
    assert found.round_executed_again().outcome == "violated"


def test_a_count_whose_noise_follows_from_the_state_alone_is_found():
    aggregator = planted_bugs.PLANTED["no fresh bits in the count"].build()
    numbers = mechanism_lib.Mechanism.of(planted_bugs.CORRECT["adaptive"].build())
    assert _probes(aggregator, numbers).round_executed_again().outcome == "violated"


def test_updates_whose_squares_overflow_are_clipped_or_count_as_nothing():
    aggregator = planted_bugs.CORRECT["identity"].build()
    assert _probes(aggregator).stays_finite().outcome == "consistent"


# The noise has no seed. Means of 200 rounds have a standard error of a fifth of a clip norm: one
# full update is found in 97 of 100 cases, and at least four in other directions are tried.
@pytest.mark.slow
@pytest.mark.parametrize(
    "clip_norm, error_rate, outcome",
    [
        (planted_bugs.CLIP_NORM / 10.0, 0.05, "violated"),
        (planted_bugs.CLIP_NORM, 1e-6, "consistent"),
    ],
)
def test_contributions_are_bounded_by_means_where_no_round_can_be_replayed(
    clip_norm, error_rate, outcome
):
    # Fresh noise in every round, of standard deviation 2 clip norms.
    aggregator = aggregation.Aggregation(
        planted_bugs.fixed(planted_bugs.NoiseWithoutSeed, identity.Identity())
    )
    numbers = dataclasses.replace(mechanism_lib.Mechanism.of(aggregator), clip_norm=clip_norm)
    found = _probes(aggregator, numbers)
    assert not found.is_replayable()
    assert found.contribution(1.0, 0.0, error_rate).outcome == outcome


def test_measurements_may_come_and_go():
    one, two = (
        playing.Played(None, np.zeros(1), {"always": 1.0} | more) for more in ({}, {"at[0]": 2.0})
    )
    assert probes._first_difference(one, one) is None
    assert probes._first_difference(two, one) == "the measurement at[0] is nan in place of 2"
    name, p_value = probes._measured_apart([(one.measurements, two.measurements)] * 5)
    assert name == "at[0]" and p_value == 1.0
