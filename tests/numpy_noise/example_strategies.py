"""One strategy of every kind, for 31 rounds."""

import numpy as np
import pytest

from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    tree,
)

ROUNDS = 31
_ROWS = np.random.default_rng(5).uniform(0.1, 0.4, (ROUNDS, 4))
_ROWS = np.where(np.arange(4) <= np.arange(ROUNDS)[:, np.newaxis], _ROWS, 0.0)
_ROWS[:, 0] += 1.0

STRATEGIES = {
    "identity": identity.Identity(),
    "blt": blt.Blt((0.9999999999921251, 0.9944453083640997, 0.8985923), (0.007, 0.106, 0.19)),
    "tree": tree.Tree(ROUNDS),
    "vanilla-tree": tree.Tree(ROUNDS, variance_reduction=False),
    "tall-tree": tree.Tree(500),
    "banded-toeplitz": banded_toeplitz.BandedToeplitz.fhu(5),
    "one-band": banded_toeplitz.BandedToeplitz((2.0,)),
    "banded": banded.Banded(_ROWS),
    "bisr": inverse_banded.InverseBanded.bisr(5),
    "bifr": inverse_banded.InverseBanded.bifr(5, 0.3),
    "lambda-cgd": inverse_banded.InverseBanded.lambda_cgd(0.7),
    "dense": dense.Dense(
        np.eye(ROUNDS) + np.tril(np.random.default_rng(1).random((ROUNDS, ROUNDS)) / 20)
    ),
    "dense-in-blocks": dense.Dense(
        np.eye(ROUNDS) + np.tril(np.random.default_rng(2).random((ROUNDS, ROUNDS)) / 20),
        rounds_at_once=6,
    ),
}

_LIKE_ANOTHER = ("vanilla-tree", "tall-tree", "one-band", "bifr", "lambda-cgd", "dense")
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in _LIKE_ANOTHER else [])
    for name in STRATEGIES
]
"""Parameters of tests that trace graphs for each: by default, one of each recipe."""
