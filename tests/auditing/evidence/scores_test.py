"""Scores of whole transcripts: standard if the claim is true, strong if it is unknown."""

from __future__ import annotations

import numpy as np
import pytest

from tff_dpftrl.auditing.evidence import scores, transcripts, worst_pattern
from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(100, 20, 5)


def _game(name, mu, trials, seed):
    """Transcripts of a claim that is kept, the signal and the covariance."""
    strategy = table.build(name, _SCHEMA)
    covariance = worst_pattern.noise_covariance(strategy, 100)
    pattern = worst_pattern.strongest_pattern(covariance, _SCHEMA)
    covariance = covariance * (pattern.norm / mu) ** 2
    signal = pattern.signal(100)
    rng = np.random.default_rng(seed)
    present = np.arange(trials) % 2 == 0
    noise = rng.normal(size=(trials, 100)) @ np.linalg.cholesky(covariance).T
    released = noise + present[:, np.newaxis] * signal
    return transcripts.Transcripts(released, present), signal, covariance


def _separation(values, present):
    spread = np.sqrt((values[present].var() + values[~present].var()) / 2.0)
    return (values[present].mean() - values[~present].mean()) / spread


@pytest.mark.parametrize("name", ["blt", "tree"])
def test_scores_are_standard_if_the_claim_is_true(name):
    mu, trials = 1.3, 4000
    played, signal, covariance = _game(name, mu, trials, 0)
    found = scores.likelihood_ratio_scores(played, signal, covariance)
    margin = 5.0 / np.sqrt(trials / 2)
    assert abs(found[played.present].mean() - mu) < margin
    assert abs(found[~played.present].mean()) < margin
    assert abs(found[played.present].std() - 1.0) < margin
    assert abs(found[~played.present].std() - 1.0) < margin


@pytest.mark.parametrize("name", ["identity", "tree"])
def test_a_classifier_that_knows_nothing_finds_nearly_as_much(name):
    played, signal, covariance = _game(name, 1.0, 8000, 1)
    train, test = played.split(0.5, 0)
    learned = _separation(scores.learned_scores(train, test), test.present)
    best = _separation(scores.likelihood_ratio_scores(test, signal, covariance), test.present)
    assert learned > 0.85 * best


def test_releases_that_never_vary_say_nothing():
    present = np.arange(80) % 2 == 0
    constant = transcripts.Transcripts(np.ones((80, 4)), present)
    np.testing.assert_array_equal(scores.learned_scores(constant, constant), np.zeros(80))


@pytest.mark.parametrize("where", ["all rounds", "one round"])
def test_noise_whose_scale_depends_on_the_canary_is_found(where):
    played, _, covariance = _game("blt", 1.0, 8000, 2)
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(8000, 100)) @ np.linalg.cholesky(covariance).T
    rounds = slice(None) if where == "all rounds" else slice(7, 8)
    noise[:, rounds] *= np.where(played.present, 1.1 if where == "all rounds" else 2.0, 1.0)[
        :, np.newaxis
    ]
    train, test = transcripts.Transcripts(noise, played.present).split(0.5, 0)
    found = scores.learned_scores(train, test)
    # Five standard errors of a separation of nothing is 0.16.
    assert _separation(found, test.present) > 0.5


def test_of_nothing_nothing_is_found():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(20):
        played = transcripts.Transcripts(rng.normal(size=(800, 10)), np.arange(800) % 2 == 0)
        train, test = played.split(0.5, 0)
        values = scores.learned_scores(train, test)
        assert np.all(np.isfinite(values))
        found.append(_separation(values, test.present) if values.std() > 0.0 else 0.0)
    assert abs(np.mean(found)) < 6.0 * np.sqrt(4.0 / 400 / 20)


def test_rounds_that_always_release_the_same_say_nothing():
    rng = np.random.default_rng(0)
    present = np.arange(2000) % 2 == 0
    released = np.concatenate(
        [np.full((2000, 1), 3.0), rng.normal(size=(2000, 1)) + present[:, np.newaxis]], axis=1
    )
    train, test = transcripts.Transcripts(released, present).split(0.5, 0)
    assert _separation(scores.learned_scores(train, test), test.present) > 0.8


def test_arguments_that_do_not_fit_are_refused():
    played, signal, covariance = _game("identity", 1.0, 30, 0)
    with pytest.raises(ValueError, match="100 rounds"):
        scores.likelihood_ratio_scores(played, signal[1:], covariance)
    with pytest.raises(ValueError, match="must not be 0"):
        scores.likelihood_ratio_scores(played, 0.0 * signal, covariance)
    with pytest.raises(ValueError, match="20 trials"):
        scores.learned_scores(played, played)
