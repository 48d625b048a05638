"""Strategies of at most 12 rounds, and their sensitivity by enumeration."""

import numpy as np

from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    restarts,
    strategy,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

ROUNDS = 12


def lower(bands: int = ROUNDS, *, signed: bool = False) -> np.ndarray:
    """Draws a matrix with so many bands and a positive diagonal."""
    rng = np.random.default_rng(bands)
    lag = np.subtract.outer(np.arange(ROUNDS), np.arange(ROUNDS))
    entries = rng.normal(size=lag.shape) if signed else rng.random(lag.shape)
    return np.where((lag > 0) & (lag < bands), entries, 0.0) + np.diag(1.0 + rng.random(ROUNDS))


def banded_strategy(bands: int, *, signed: bool = False) -> banded.Banded:
    matrix = lower(bands, signed=signed)
    rows = np.zeros((ROUNDS, bands))
    for j in range(bands):
        rows[j:, j] = np.diagonal(matrix, -j)
    return banded.Banded(rows)


_TREE = tree.Tree(ROUNDS)
_BLT = blt.Blt((0.95, 0.5), (0.3, 0.2))

# Strategies whose stated sensitivity must be exact under every schema.
EXACT = {
    "identity": identity.Identity(),
    "tree": _TREE,
    "vanilla tree": tree.Tree(ROUNDS, variance_reduction=False),
    "full tree": tree.FullTree(),
    "blt": _BLT,
    "two-banded": banded_strategy(2),
    "fhu": banded_toeplitz.BandedToeplitz.fhu(5),
    "bisr": inverse_banded.InverseBanded.bisr(4),
    "lambda-cgd": inverse_banded.InverseBanded.lambda_cgd(0.7),
    "restarted tree": restarts.Restarted(_TREE, (0, 3, 8)),
    "restarted blt": restarts.Restarted(_BLT, (0, 4, 9)),
    "restarted bisr": restarts.Restarted(inverse_banded.InverseBanded.bisr(4), (0, 5)),
}
# Strategies that may get an upper bound, at most this much above the truth.
BOUNDED = {
    "banded": (banded_strategy(4), 1.25),
    "dense": (dense.Dense(lower()), 1.35),
    "rising banded Toeplitz": (banded_toeplitz.BandedToeplitz((1.0, 0.1, 0.8)), 1.35),
    "blt that rises": (blt.Blt((0.9, 0.6), (0.8, 0.7)), 1.6),
    "restarted banded": (restarts.Restarted(banded_strategy(4), (0, 6)), 1.25),
}
# CᵀC has negative entries: the worst contributions point in different directions.
SIGNED = {
    "signed banded": banded_strategy(3, signed=True),
    "signed dense": dense.Dense(lower(signed=True)),
    "signed Toeplitz": banded_toeplitz.BandedToeplitz((1.0, -0.4, 0.3)),
    "oscillating inverse": inverse_banded.InverseBanded((1.0, 0.6)),
    "restarted signed": restarts.Restarted(banded_strategy(3, signed=True), (0, 5)),
}
ALL: dict[str, strategy.Strategy] = {
    **EXACT,
    **{name: made for name, (made, _) in BOUNDED.items()},
    **SIGNED,
}


def worst(matrix: np.ndarray, schema: schema_lib.MinSep) -> float:
    """Computes max ‖C u‖² over the indicators u of all patterns."""
    return max(np.sum(matrix[:, list(p)].sum(axis=1) ** 2) for p in schema.patterns())


def check_matrices(made: strategy.Strategy, num_rounds: int) -> None:
    """Compares what a strategy says of its noise with dense algebra."""
    matrix, noise = made.strategy_matrix(num_rounds), made.noise_matrix(num_rounds)
    np.testing.assert_allclose(noise @ matrix, np.eye(num_rounds), atol=1e-12)
    for variance, rows in (
        (made.round_noise_variance(num_rounds), noise),
        (made.prefix_noise_variance(num_rounds), np.cumsum(noise, axis=0)),
    ):
        np.testing.assert_allclose(variance, np.sum(rows**2, axis=1), rtol=1e-11)
