"""Noise forensics: silent on noise that is right, and what is planted is found."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.linalg
from scipy import special, stats

from tff_dpftrl.auditing.evidence import correlations, forensics, worst_pattern
from tff_dpftrl.mechanisms import blt, restarts, tree

_BLT = blt.Blt((0.95, 0.5), (0.3, 0.2))
_STDDEV = 2.0
_ROUNDS = 20


def _record(name, draws, strategy, *, matrix=None, covariance=None):
    """What is released for draws z ~ N(0, 1), [runs, draws of a coordinate, coordinates]."""
    num_rounds = draws.shape[1]
    if matrix is None:
        matrix = strategy.noise_matrix(num_rounds)
        num_rounds = len(matrix)
    if covariance is None:
        covariance = worst_pattern.noise_covariance(strategy, num_rounds)
    noise = _STDDEV * np.einsum("ts,rsc->rtc", matrix, draws)
    return forensics.Recording(name, noise.astype(np.float32), _STDDEV, covariance)


def _draws(seed, runs=3, rounds=_ROUNDS, coordinates=600):
    return np.random.default_rng(seed).normal(size=(runs, rounds, coordinates))


def _violated(recordings, error_rate=0.05):
    found = forensics.examine(recordings, error_rate=error_rate)
    return {one.test.removeprefix("noise: ") for one in found if one.outcome == "violated"}


@pytest.mark.parametrize("repetitions", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_noise_that_is_right_is_seldom_called_wrong(repetitions):
    rate = 0.2
    alarms = 0
    for seed in range(repetitions):
        recordings = [
            _record(name, _draws([seed, i], 3, 8, 30), _BLT) for i, name in enumerate("ab")
        ]
        alarms += bool(_violated(recordings, rate))
    assert alarms <= stats.binom.isf(1e-6, repetitions, rate)


def test_noise_of_trees_and_restarts_is_right():
    num_rounds = 12
    for strategy in (
        tree.Tree(num_rounds),
        tree.Tree(num_rounds, variance_reduction=False),
        restarts.Restarted(_BLT, (0, 5)),
    ):
        matrix = strategy.noise_matrix(num_rounds)
        covariance = worst_pattern.noise_covariance(strategy, num_rounds)
        recordings = [
            _record(
                name,
                _draws([7, i], rounds=matrix.shape[1]),
                strategy,
                matrix=matrix,
                covariance=covariance,
            )
            for i, name in enumerate("ab")
        ]
        assert not _violated(recordings, 0.01)


def _too_little(draws):
    return draws * 0.8


def _seed_not_advanced(draws):
    return np.repeat(draws[:, :1], draws.shape[1], axis=1)


def _same_in_all_runs(draws):
    return np.repeat(draws[:1], len(draws), axis=0)


def _one_round_again(draws):
    changed = draws.copy()
    changed[:, 11] = changed[:, 10]
    return changed


def _one_draw_for_two_coordinates(draws):
    return np.repeat(draws[..., ::2], 2, axis=2)


def _not_centred(draws):
    return draws + 0.05


_PLANTED = {
    _too_little: {"standard deviation", "standard deviation of each round", "tails"},
    _seed_not_advanced: {"correlation of rounds"},
    _same_in_all_runs: {"correlation of runs"},
    _one_round_again: {"correlation of rounds"},
    _one_draw_for_two_coordinates: {"correlation of coordinates", "equal values"},
    _not_centred: {"mean"},
}


@pytest.mark.parametrize("plant", _PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_what_is_planted_is_found(plant):
    for seed in range(3):
        recordings = [
            _record("a", plant(_draws([seed, 0])), _BLT),
            _record("b", _draws([seed, 1]), _BLT),
        ]
        assert _PLANTED[plant] <= _violated(recordings, 0.01)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_same_seed_in_two_tensors_is_found(shift):
    draws = _draws(0, coordinates=700)
    first = _record("a", draws[..., :600], _BLT)
    second = _record("b", draws[..., shift : shift + 500], _BLT)
    assert _violated([first, second], 0.01) == {"correlation of tensors and streams"}


def test_a_stream_that_lags_behind_another_is_found():
    draws = _draws(0, rounds=_ROUNDS + 3)
    first = _record("updates", draws[:, 3:], _BLT)
    second = _record("counts", draws[:, :_ROUNDS, :32], _BLT)
    assert _violated([first, second], 0.01) == {"correlation of tensors and streams"}


def test_a_restart_without_fresh_noise_is_found():
    strategy = restarts.Restarted(_BLT, (0, 12))
    draws = _draws(0)
    draws[:, 12:] = draws[:, : _ROUNDS - 12]
    found = _violated([_record("a", draws, strategy)], 0.01)
    assert "correlation of rounds" in found
    assert "equal values" in found


def test_a_resume_that_repeats_rounds_or_loses_buffers_is_found():
    lost = scipy.linalg.block_diag(_BLT.noise_matrix(10), _BLT.noise_matrix(10))
    found = _violated([_record("a", _draws(0, runs=5), _BLT, matrix=lost)], 0.01)
    assert "correlation of rounds" in found
    draws = _draws(1)
    draws[:, 10:14] = draws[:, 6:10]  # The counter was saved four rounds before.
    assert "correlation of rounds" in _violated([_record("a", draws, _BLT)], 0.01)


def test_a_generator_with_too_short_a_tail_is_found():
    uniform = np.random.default_rng(0).random((12, 2, _ROUNDS, 25_000), np.float32)
    found = _violated([_record("sum of uniforms", uniform.sum(axis=0) - 6.0, _BLT)], 0.01)
    assert found == {"tails"}
    cut = np.clip(_draws(0, coordinates=25_000), -3.8, 3.8)
    assert "tails" in _violated([_record("cut off", cut, _BLT)], 0.01)


def test_a_generator_of_sixteen_bits_is_found():
    levels = np.random.default_rng(0).integers(0, 2**16, (2, 5, 5000))
    draws = special.ndtri((levels + 0.5) / 2**16)
    assert "equal values" in _violated([_record("a", draws, _BLT)], 0.01)


def test_half_precision_is_no_repeat_if_it_is_said():
    recording = _record("a", _draws(0, coordinates=5000), _BLT)
    half = recording.noise.astype(np.float16)
    for bits, expected in ((11, set()), (24, {"equal values"})):
        changed = forensics.Recording(
            "a", half, _STDDEV, recording.covariance, significant_bits=bits
        )
        assert _violated([changed], 0.01) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rounding_to_few_bits_is_no_short_tail(scale):
    # Rounding moves the distribution function by about 1e-3: 8 standard errors of 4 million values.
    noise = np.random.default_rng(0).normal(size=(2, 10, 200_000))
    step = 2.0 ** (np.floor(np.log2(np.abs(noise))) - 7)
    rounded = np.round(noise * scale / step) * step
    recording = forensics.Recording("a", rounded, scale, np.eye(10), significant_bits=8)
    assert _violated([recording], 0.05) == set()


def test_more_noise_is_said_and_is_no_violation():
    found = forensics.examine([_record("a", 1.1 * _draws(0), _BLT)], error_rate=0.05)
    assert all(one.outcome != "violated" for one in found)
    assert "more noise than claimed" in found[0].says


def test_what_cannot_be_tested_is_said():
    found = forensics.examine([_record("a", _draws(0, runs=1), _BLT)], error_rate=0.05)
    untested = {one.test for one in found if one.outcome == "not tested"}
    assert untested == {
        "noise: correlation of tensors and streams",
        "noise: correlation of runs",
    }
    assert sum(one.error_rate for one in found) == pytest.approx(0.05)


def _power_of(test, recordings):
    found = forensics.examine(recordings, error_rate=0.05)
    power = next(one for one in found if one.test == f"noise: {test}").power
    return float(re.search(r"[0-9.]+", power)[0])


@pytest.mark.parametrize("repetitions", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_the_smallest_deviation_that_is_stated_is_found_with_the_stated_probability(
    repetitions,
):

    def recordings(seed, change):
        return [_record(n, change(_draws([seed, i], 2, 6, 60)), _BLT) for i, n in enumerate("ab")]

    plain = recordings(0, lambda draws: draws)
    factor = _power_of("standard deviation", plain)
    one_round = _power_of("standard deviation of each round", plain)
    mean = _power_of("mean", plain)
    strength = _power_of("correlation of rounds", plain)

    def scale_one(draws):
        return draws * np.where(np.arange(6) == 3, one_round, 1.0)[:, np.newaxis]

    def shift_one(draws):
        return draws + mean * (np.arange(60) == 5)

    def correlate_two(draws):
        changed = draws.copy()
        changed[:, 4] = strength * draws[:, 1] + np.sqrt(1.0 - strength**2) * draws[:, 4]
        return changed

    planted = {
        "standard deviation": lambda draws: draws * factor,
        "standard deviation of each round": scale_one,
        "mean": shift_one,
        "correlation of rounds": correlate_two,
    }
    for test, change in planted.items():
        missed = sum(
            test not in _violated(recordings(seed, change)) for seed in range(1, repetitions + 1)
        )
        assert missed <= stats.binom.isf(1e-4, repetitions, 0.01), test


@pytest.mark.slow
def test_the_share_of_missing_large_values_that_is_stated_is_found():
    def record(seed, kept):
        rng = np.random.default_rng(seed)
        draws = rng.normal(size=(2, 5, 8000))
        large = np.abs(draws) > 3.0
        drawn_again = rng.normal(size=np.count_nonzero(large))
        replaced = rng.random(len(drawn_again)) > kept
        draws[large] = np.where(replaced, np.clip(drawn_again, -3.0, 3.0), draws[large])
        return [_record("a", draws, _BLT)]

    kept = _power_of("tails", record(0, 1.0)) / 100.0
    missed = sum("tails" not in _violated(record(seed, kept)) for seed in range(1, 41))
    assert 0.5 < kept < 0.9
    assert missed <= 4  # A chance of 7e-5 at 99 %.


def test_the_largest_of_many_correlations_has_the_chance_that_is_stated():
    rate, repetitions, alarms = 0.2, 400, 0
    for seed in range(repetitions):
        rng = np.random.default_rng(seed)
        scan = correlations.Scan()
        scan.add(rng.normal(size=(5, 12)), rng.normal(size=(5, 12)), "{} and {}")
        alarms += scan.finding("any", rate, together=True).outcome == "violated"
    assert 0.4 * rate * repetitions < alarms <= stats.binom.isf(1e-6, repetitions, rate)


def test_many_correlations_too_small_to_be_seen_are_found_together():
    rng = np.random.default_rng(0)
    common = rng.normal(size=1000)
    rows = 0.25 * common + rng.normal(size=(60, 1000))
    scan = correlations.Scan()
    scan.add(rows, rows, "{} and {}", np.triu(np.ones((60, 60), bool), 1))
    assert scan.chance_of_squares() < 1e-9


def test_arguments_that_make_no_sense_are_refused():
    recording = _record("a", _draws(0), _BLT)
    with pytest.raises(ValueError, match="error_rate"):
        forensics.examine([recording], error_rate=0.0)
    with pytest.raises(ValueError, match="same runs and rounds"):
        forensics.examine([], error_rate=0.1)
    with pytest.raises(ValueError, match="same runs and rounds"):
        forensics.examine([recording, _record("b", _draws(0, runs=2), _BLT)], error_rate=0.1)
    with pytest.raises(ValueError, match="different names"):
        forensics.examine([recording, recording], error_rate=0.1)
    good = {"name": "a", "noise": np.ones((1, 2, 8)), "stddev": 1.0, "covariance": np.eye(2)}
    for changed, message in (
        ({"noise": np.ones((1, 2, 3))}, "coordinates"),
        ({"covariance": np.eye(3)}, "covariance"),
        ({"noise": np.full((1, 2, 8), np.nan)}, "finite"),
        ({"stddev": 0.0}, "stddev"),
    ):
        with pytest.raises(ValueError, match=message):
            forensics.Recording(**(good | changed))
