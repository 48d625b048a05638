"""Two branches of one state: what is new in their noise is independent, for every mechanism."""

import numpy as np
import pytest
import tensorflow as tf

from tests.numpy_noise import example_strategies
from tff_dpftrl.mechanisms import restarts
from tff_dpftrl.private_round import (
    adaptive_clipping,
    clipping,
    estimators,
    fixed_clip,
    sampled_gaussian,
)

_SIZE = 30_000
_FORK, _ROUNDS = 5, 11
_RESTARTED = {
    name: restarts.Restarted(example_strategies.STRATEGIES[name], (0, 4, 8))
    for name in ("blt", "vanilla-tree", "lambda-cgd")
}
_NAMES = [*example_strategies.NAMES, "restarted blt"]
_NAMES += [
    pytest.param(f"restarted {name}", marks=pytest.mark.slow) for name in list(_RESTARTED)[1:]
]


def _strategy(name):
    return (
        _RESTARTED.get(name.removeprefix("restarted "))
        if name.startswith("restarted ")
        else (example_strategies.STRATEGIES[name])
    )


def _played(private_round, state, num_rounds):
    """Unit noise of some rounds, [num_rounds, size], and the state after them."""
    step = tf.function(
        lambda state: private_round.release(state, private_round.no_contribution([[_SIZE]]))[:2]
    )
    rows = []
    for _ in range(num_rounds):
        state, (released,) = step(state)
        rows.append(released.numpy())
    return np.array(rows), state


def _correlations(rows):
    """Largest correlation of two different rows, in standard errors."""
    gram = np.corrcoef(rows)
    return float(np.max(np.abs(gram - np.diag(np.diag(gram))))) * np.sqrt(rows.shape[1])


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_branches_have_independent_new_noise(name, secure):
    strategy = _strategy(name)
    private_round = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping(1.0),
        clients_per_round=1,
        secure_noise=secure,
    )
    past, state = _played(private_round, private_round.initial_state([[_SIZE]]), _FORK)
    branches = [_played(private_round, state, _ROUNDS - _FORK)[0] for _ in range(2)]
    # The covariance of a run has one Cholesky factor: its inverse takes noise to what is new in it.
    matrix = strategy.noise_matrix(_ROUNDS)
    factor = np.linalg.cholesky(matrix @ matrix.T)
    new = [np.linalg.solve(factor, np.concatenate([past, branch])) for branch in branches]
    rows = np.concatenate([new[0], new[1][_FORK:]])
    # With 136 pairs, 5 standard errors are exceeded once in 13,000 times.
    assert _correlations(rows) < 5
    # Variances of n Gaussians are within 6 √(2/n) of 1.
    np.testing.assert_allclose(np.var(rows, axis=1), 1, atol=6 * np.sqrt(2 / _SIZE))
    np.testing.assert_array_equal(new[0][:_FORK], new[1][:_FORK])


@pytest.mark.parametrize("kind", ["adaptive", "sampled"])
def test_every_stream_of_a_round_is_new(kind):
    if kind == "adaptive":
        private_round = adaptive_clipping.AdaptiveClipRound(
            _RESTARTED["blt"], noise_multiplier=1.0, clients_per_round=20
        )
    else:
        private_round = sampled_gaussian.SampledGaussianRound(
            clipping=clipping.FlatClipping(1.0),
            noise_multiplier=1.0,
            estimator=estimators.FixedDenominator(0.5, 4),
        )
    state, totals = private_round.initial_state([[9]]), private_round.no_contribution([[9]])
    for _ in range(2):
        state, *_ = private_round.release(state, totals)
    outcomes = [private_round.release(state, totals) for _ in range(2)]
    (_, (one,), measured), (_, (other,), again) = outcomes
    assert not np.any(one == other)
    if kind == "adaptive":
        assert measured["unclipped_fraction"] != again["unclipped_fraction"]


def test_a_deterministic_seed_has_no_branches():
    private_round = fixed_clip.FixedClipRound(
        _RESTARTED["vanilla-tree"],
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping(1.0),
        clients_per_round=1,
        deterministic_seed=3,
    )
    state, totals = private_round.initial_state([[9]]), private_round.no_contribution([[9]])
    for _ in range(6):
        again = private_round.release(state, totals)
        made = private_round.release(state, totals)
        tf.nest.map_structure(np.testing.assert_array_equal, again, made)
        state = made[0]
