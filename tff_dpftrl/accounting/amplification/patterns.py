"""Sums of the columns of C over sets of rounds, and their inner products."""

from __future__ import annotations

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import (
    banded_toeplitz,
    blt,
    identity,
    inverse_banded,
    noise_recipe,
)
from tff_dpftrl.mechanisms import strategy as strategy_lib

_ROUNDING = 1e-12
"""Relative error allowed for in an inner product."""
_MOST_ROUNDS = 8192
"""Largest number of rounds for which a dense C is built: half a gigabyte."""


def _padded(values: tuple[float, ...], size: int) -> np.ndarray:
    column = np.zeros(size)
    column[: min(len(values), size)] = values[:size]
    return column


def _first_column(strategy: strategy_lib.Strategy, num_rounds: int) -> np.ndarray | None:
    """Returns the first column of a Toeplitz C, shape [num_rounds]; None for other strategies."""
    if isinstance(strategy, identity.Identity):
        return _padded((1.0,), num_rounds)
    if isinstance(strategy, banded_toeplitz.BandedToeplitz):
        return _padded(strategy.coefficients, num_rounds)
    if isinstance(strategy, (blt.Blt, inverse_banded.InverseBanded)):
        return strategy.coefficients(num_rounds)
    return None


def _nonnegative(values: np.ndarray, strategy: strategy_lib.Strategy) -> np.ndarray:
    if float(values.min()) < -_ROUNDING * float(np.abs(values).max()):
        raise validation.UsageError(
            f"strategy must have a C without negative entries, got {strategy.name!r} with an entry "
            f"of {float(values.min()):.3g}: the worst unit of a secret sample is known only then. "
            "Use a BLT, a banded one with coefficients of at least 0, or no amplification."
        )
    return np.maximum(values, 0.0)


def columns(strategy: strategy_lib.Strategy, num_rounds: int) -> np.ndarray:
    """Returns C, dense, of nonnegative entries, shape [m, num_rounds]."""
    if num_rounds > _MOST_ROUNDS:
        raise validation.UsageError(
            f"num_rounds must be at most {_MOST_ROUNDS} where all of C is needed, as for estimates "
            f"and for a C that is not the same in all rounds, got {num_rounds}: use the bound of a "
            "BLT or a banded Toeplitz strategy."
        )
    return _nonnegative(strategy.strategy_matrix(num_rounds), strategy)


def bin_sums(strategy: strategy_lib.Strategy, num_rounds: int, num_bins: int) -> np.ndarray:
    """Computes the sums of the columns of C over the rounds of each bin, shape [num_bins, m]."""
    dense = columns(strategy, num_rounds)
    return np.stack([dense[:, j::num_bins].sum(axis=1) for j in range(num_bins)])


def bin_kernel(strategy: strategy_lib.Strategy, num_rounds: int, num_bins: int) -> np.ndarray:
    """Computes the largest inner product of two bins' sums of columns, by their distance.

    Bin j is the rounds j, j + num_bins, j + 2 num_bins, …; its sum of columns is m_j. Bins lie on a
    circle: the last is a neighbour of the first. The result has shape [num_bins // 2 + 1], is
    rounded up and does not increase. Entry d is the largest <m_j, m_l> of bins at a distance of d
    or more; entry 0 is the largest |m_j|².
    """
    strategy_lib.check_strategy(strategy)
    column = _first_column(strategy, num_rounds)
    if column is not None:
        column = _nonnegative(column, strategy)
        # Column sums of bin 0; those of bin j are the same, j rounds later, so that bin 0 has
        # the largest inner products at every distance.
        total = column.copy()
        for begin in range(num_bins, num_rounds, num_bins):
            end = min(begin + num_bins, num_rounds)
            total[begin:end] += total[begin - num_bins : end - num_bins]
        by_lag = np.array([total[lag:] @ total[: num_rounds - lag] for lag in range(num_bins)])
        gram = by_lag[None, :]
    else:
        sums = bin_sums(strategy, num_rounds, num_bins)
        gram = sums @ sums.T
    lag = np.abs(np.arange(len(gram))[:, None] - np.arange(num_bins)[None, :])
    distance = np.minimum(lag, num_bins - lag)
    kernel = np.zeros(num_bins // 2 + 1)
    np.maximum.at(kernel, distance.ravel(), gram.ravel())
    return np.maximum.accumulate(kernel[::-1])[::-1] * (1.0 + _ROUNDING)


def check_nonnegative(strategy: strategy_lib.Strategy, num_rounds: int) -> None:
    """Refuses a C with a negative entry, or too many rounds to find out."""
    strategy_lib.check_strategy(strategy)
    column = _first_column(strategy, num_rounds)
    if column is None:
        columns(strategy, num_rounds)
    else:
        _nonnegative(column, strategy)


def num_bands(strategy: strategy_lib.Strategy, num_rounds: int) -> int:
    """Counts the bands of C: C[i, j] = 0 for i − j >= num_bands; num_rounds if all are in use."""
    recipe = strategy.noise_recipe()
    if isinstance(recipe, noise_recipe.IdentityNoise):
        return 1
    if isinstance(recipe, noise_recipe.BandedNoise):
        return min(len(recipe.rows[0]), num_rounds)
    return num_rounds
